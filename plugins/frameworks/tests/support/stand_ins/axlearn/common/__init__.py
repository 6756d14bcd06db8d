"""A stand-in for AXLearn, see the package's docstring."""
