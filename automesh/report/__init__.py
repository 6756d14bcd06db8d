"""What a search found, and how it is shown and written (no jax)."""
