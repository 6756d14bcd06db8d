"""Decides which plans are worth a compile or a measurement (pure functions)."""
