"""A mesh rule in the words of the frameworks that people train with, written and read."""
