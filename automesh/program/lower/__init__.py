"""The user's step lowered and compiled (jax)."""
