"""Creates meshes, lays them out on devices, and puts arrays and batches on them (jax)."""
