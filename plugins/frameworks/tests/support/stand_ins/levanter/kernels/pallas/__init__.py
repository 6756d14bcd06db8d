"""A stand-in, see `levanter`."""
