"""What a run would take of memory, time and money, before anything is bought. Nothing is started or written."""
