"""Carries the step of a script from the mesh of its one run to other meshes and processes (jax)."""
