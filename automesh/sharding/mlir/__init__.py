"""Reads partitioned MLIR modules into `ir.graph` (jax)."""
