"""The partitioned step as a graph, without jax."""
