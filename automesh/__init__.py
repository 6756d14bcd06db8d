"""automesh finds the fastest device mesh for a JAX training step, and proves it."""
