"""Runs scripts without a `build` function, unmodified and up to their step, on a mesh that automesh
chooses."""
