"""Estimate a run's memory, time and cost before anything is bought. Starts and writes nothing."""
