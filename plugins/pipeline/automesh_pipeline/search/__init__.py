"""Pipeline steps in a search, as the programs of their stages (jax)."""
