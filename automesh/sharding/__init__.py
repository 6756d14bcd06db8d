"""Shardy: propagation of shardings through a lowered step, read back as a graph (jax)."""
