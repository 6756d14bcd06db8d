"""Partitioned MLIR modules read into `ir.graph` (jax)."""
