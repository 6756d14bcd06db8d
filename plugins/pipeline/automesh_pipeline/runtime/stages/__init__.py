"""The compiled programs of the stages, and what moves between them (jax)."""
