"""The search: requests, sessions, and the rungs from estimate to measurement (no jax)."""
