"""A stand-in for MaxText, see the README beside it."""
