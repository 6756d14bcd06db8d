"""Rules files: they map the name of a target to its mesh."""
