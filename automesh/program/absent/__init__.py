"""Programs for devices that are not here (jax)."""
