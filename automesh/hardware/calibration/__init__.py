"""How fast devices are: data sheets, measured profiles, and laws fitted to them (no jax)."""
