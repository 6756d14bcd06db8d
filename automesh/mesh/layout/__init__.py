"""Meshes on devices: created, laid out, and the arrays and batches that are put on them (jax)."""
