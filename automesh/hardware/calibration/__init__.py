"""How fast devices are: data sheets, measured profiles, and the laws between (no jax)."""
