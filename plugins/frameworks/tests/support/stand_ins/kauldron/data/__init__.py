"""A part of the stand-in for Kauldron, see the README beside it."""
