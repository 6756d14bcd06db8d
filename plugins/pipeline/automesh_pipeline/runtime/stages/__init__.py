"""The compiled programs of the stages, and the transfers between them (jax)."""
