"""Finds which dimensions of a step without annotations must be split alike."""
