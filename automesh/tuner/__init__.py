"""The ladder of rungs, its study, its statistics (no jax)."""
