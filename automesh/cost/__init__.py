"""Computes the seconds of a step from what it computes, moves and sends (no jax)."""
