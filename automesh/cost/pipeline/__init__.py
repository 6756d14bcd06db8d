"""Time and memory of steps that are pipelines (no jax)."""
