"""A stand-in for EasyDeL, see the README beside it."""
