"""What a mesh is. Importing this never imports jax; `mesh.layout` is its jax half."""
