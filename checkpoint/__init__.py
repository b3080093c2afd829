"""The run store: the data that outlives the machines."""
