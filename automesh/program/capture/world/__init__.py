"""The world that a script sees while it is run up to its step, put back after each run (jax)."""
