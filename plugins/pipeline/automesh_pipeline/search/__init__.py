"""Steps that are pipelines, as programs of their stages (jax)."""
