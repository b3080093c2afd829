"""A cloud account on one machine, for tests: namespaces as machines, faults on command."""
