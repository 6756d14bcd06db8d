"""How devices are wired: links, torus paths, and the routes of mesh axes over them (no jax)."""
