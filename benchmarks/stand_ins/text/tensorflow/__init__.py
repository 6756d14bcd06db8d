"""Stands in for TensorFlow where a script imports it to read data only: constants of texts."""

from __future__ import annotations

from typing import Any

import numpy as np

string = "string"


class Constant:
    """An array as TensorFlow gives it."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values


def constant(values: list[str], **_options: Any) -> Constant:
    """Texts as bytes."""
    return Constant(np.array([value.encode() for value in values], dtype=object))
