"""Models how XLA's partitioner splits products, convolutions, gathers and scatters (no jax)."""
