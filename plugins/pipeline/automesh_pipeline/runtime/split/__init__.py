"""A loss cut into the functions of its stages (jax)."""
