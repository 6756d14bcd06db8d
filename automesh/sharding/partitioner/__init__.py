"""What XLA's partitioner makes of products, convolutions, gathers and scatters (no jax)."""
