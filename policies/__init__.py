"""Pure decisions: no clock, no randomness, no I/O, only the standard library.

Every function takes the known facts, time included, and returns a decision.
"""
