"""Broken steps, each with its finding, and mended; see `benchmarks.lint`."""
