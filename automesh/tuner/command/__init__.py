"""Searches for programs whose mesh is a flag: runs a command for each plan, and times its steps."""
