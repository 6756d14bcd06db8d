"""Discrete-event replay of scheduled programs on hardware (no jax)."""
