"""Pipelines on devices: one program per stage, each on its own submesh (jax).

This module imports nothing, so that `automesh.pipeline` itself needs no jax.
"""
