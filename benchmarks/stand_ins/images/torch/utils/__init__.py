"""Stands in for `torch.utils`."""

from torch.utils import data, tensorboard

__all__ = ["data", "tensorboard"]
