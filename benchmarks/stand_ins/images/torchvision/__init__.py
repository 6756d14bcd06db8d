"""Stands in for `torchvision`: random images."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
