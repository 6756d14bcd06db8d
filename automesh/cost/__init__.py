"""Seconds from counts (no jax)."""
