"""Counts the work of Pallas kernels from their own programs, if they state no cost."""
