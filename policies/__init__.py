"""Pure decisions: no clock, no randomness, no I/O, nothing but the standard library.

Every function here takes what is known and returns what should be; time arrives as an argument.
"""
