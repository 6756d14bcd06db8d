"""What a mesh is. Importing this never imports jax; `automesh.mesh.devices` is its jax half."""
