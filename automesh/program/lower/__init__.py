"""Lowers and compiles the user's step (jax)."""
