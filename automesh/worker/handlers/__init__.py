"""The code with which a worker does each kind of job (jax)."""
