"""Adapters: the training steps of frameworks as `build` functions, which a search finds by name."""
