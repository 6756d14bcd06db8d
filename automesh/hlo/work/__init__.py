"""The work of single instructions: FLOPs, bytes, contents of fusions (no jax)."""
