"""A stand-in for Kauldron, see the README beside it."""
