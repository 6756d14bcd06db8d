"""Prepares, runs and times the user's step with arrays (jax)."""
