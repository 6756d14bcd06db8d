"""The user's step with arrays: made ready, run and timed (jax)."""
