"""The run store: what outlives a machine."""
