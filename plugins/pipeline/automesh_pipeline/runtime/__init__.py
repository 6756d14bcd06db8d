"""Pipelines on devices: one program per stage, each on its own submesh (jax).

Nothing is imported here, so that `automesh.pipeline` itself needs no jax.
"""
