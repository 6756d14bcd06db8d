"""Propagates shardings through a step with Shardy, and reads the result as a graph (jax)."""
