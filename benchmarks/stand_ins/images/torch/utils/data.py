"""Stands in for `torch.utils.data`: batches of whatever a data set gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import torch


class Dataset:
    """What has a length and gives examples."""


class DataLoader:
    """Batches of pairs of arrays, in order."""

    def __init__(self, dataset: Any, batch_size: int = 1, **_options: Any) -> None:
        self._dataset = dataset
        self._size = batch_size

    def __len__(self) -> int:
        return len(self._dataset) // self._size

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            rows = [self._dataset[number * self._size + row] for row in range(self._size)]
            yield tuple(torch.Tensor(np.stack(column)) for column in zip(*rows, strict=True))
