"""What a mesh is. Importing this never imports jax; `automesh.mesh.layout.devices` is its jax half."""
