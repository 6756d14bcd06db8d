"""Compiles today's step for the rules of a file; reads an earlier version of a script from git."""
