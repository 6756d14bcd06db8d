"""What a mesh is. Importing this package never imports jax; `automesh.mesh.devices` is its jax half."""
