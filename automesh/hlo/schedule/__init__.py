"""A compiled module as the ordered operations of one device (no jax)."""
