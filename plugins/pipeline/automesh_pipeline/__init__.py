"""Runs pipelines on submeshes, and compiles, measures and estimates them in a search."""

from automesh.package import count_as_ours

count_as_ours(__name__, __file__)
