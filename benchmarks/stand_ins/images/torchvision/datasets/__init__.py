"""Stands in for `torchvision.datasets`: random images with labels.

With transforms the images are from -1 to 1 and have their channels first; without, they are bytes,
as an image is that was not transformed.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class _Images:
    shape = (1, 28, 28)

    def __init__(self, *_arguments: Any, **options: Any) -> None:
        self._is_raw = "transform" not in options

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        if place >= len(self):
            raise IndexError(place)
        random = np.random.default_rng(place)
        if self._is_raw:
            rows = random.integers(0, 256, (*self.shape[1:], self.shape[0]), dtype=np.uint8)
            return rows.squeeze(), np.asarray(random.integers(0, 10))
        image = random.uniform(-1, 1, self.shape).astype(np.float32)
        return image, np.asarray(random.integers(0, 10))


class MNIST(_Images):
    """Digits."""


class CIFAR10(_Images):
    """Small photographs."""

    shape = (3, 32, 32)
