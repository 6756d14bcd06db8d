"""Searches for programs whose mesh is a flag: a command is run for each plan, its steps timed."""
