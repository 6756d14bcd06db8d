"""Loads, builds and checks the user's script."""
