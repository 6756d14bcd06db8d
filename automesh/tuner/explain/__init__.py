"""Explains the time of a mesh from the data of a study."""
