"""A run of a script whose arrays have no data."""
