"""The environment in which a script is run up to its step, and how it is restored after each run
(jax)."""
