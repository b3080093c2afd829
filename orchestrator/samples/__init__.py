"""What the store keeps of a step for people, read: which steps there are, and which completions one wants.

For the command and the page alike. Nothing here writes, and texts are as they were stored: whoever shows them
makes them fit for where they are shown.
"""
