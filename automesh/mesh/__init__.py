"""The nouns of a mesh. Importing this package never imports jax; `mesh.layout` is its jax half."""
