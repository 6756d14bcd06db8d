"""What single instructions compute and move: FLOPs, bytes, fusions (no jax)."""
