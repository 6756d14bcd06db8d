"""Adapters: the training steps of frameworks, as `build` functions that a search finds by name."""
