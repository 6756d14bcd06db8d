"""Programs for absent devices (jax)."""
