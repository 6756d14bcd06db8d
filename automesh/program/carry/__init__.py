"""The step of a script, taken from the mesh of its one run to other meshes and processes (jax)."""
