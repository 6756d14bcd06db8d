"""The nan that a script reads for a single number without data (no jax).

Nearly every script reads its loss to show it, and many ask next whether it is finite, to stop a
training that diverges. A loss without data is nan, so that no comparison holds, but it has not
diverged: `isnan` and `isfinite` of `math` and NumPy take it for a finite number.

The bits of its mantissa distinguish the number from a nan that the script computes. Processors keep
these bits where nan is combined with another number, and where it is converted to 32 or 16 bits and
back (IEEE 754-2019, section 6.2.3, recommends it).
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NUMBERS = (float, np.floating, np.ndarray)
# A quiet nan with a pattern in the six bits that follow, which no operation makes.
_BITS = 0x7FF8 << 48 | 0b110101 << 45
_WITHOUT_SIGN = 2**63 - 1

UNREAD: float = struct.unpack("<d", struct.pack("<Q", _BITS))[0]


def is_unread(value: Any) -> Any:
    """Whether a number stands for one without data, or was computed from such a number.

    Returns:
      A truth value; for an array, one for each of its elements.
    """
    array = np.asarray(value)
    if array.dtype.kind != "f":
        return np.zeros(array.shape, bool)[()]
    bits = np.asarray(array, np.float64).view(np.int64) & _WITHOUT_SIGN
    return (bits == _BITS)[()]


def is_unread_number(value: Any) -> bool:
    """Whether a value is a single number, and stands for one without data."""
    return isinstance(value, _NUMBERS) and np.ndim(value) == 0 and bool(is_unread(value))


@contextmanager
def counted_as_finite() -> Generator[None]:
    """Lets `isnan` and `isfinite` take unread numbers for finite ones while the body runs."""
    replaced: list[tuple[Any, str, Any]] = []
    for module, name, answer in (
        (math, "isnan", False),
        (math, "isfinite", True),
        (np, "isnan", False),
        (np, "isfinite", True),
    ):
        original = getattr(module, name)
        replaced.append((module, name, original))
        setattr(module, name, _Finiteness(original, (module.__name__, name), answer=answer))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


class _Finiteness:
    """The function `isnan` or `isfinite` of a module, with an answer for unread numbers.

    Args:
      place: its module, and its name there.
      answer: what it returns for unread numbers.
    """

    def __init__(
        self, original: Callable[..., Any], place: tuple[str, str], *, answer: bool
    ) -> None:
        self._original = original
        self._place = place
        self._answer = answer
        self.__doc__ = original.__doc__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A stored step that has imported it gets that of its own process.
        return _named, self._place

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._original(value, *args, **kwargs)
        if args or kwargs or not np.any(np.asarray(found) != self._answer):
            return found
        unread = is_unread(value)
        if not np.any(unread):
            return found
        made = found | unread if self._answer else found & ~unread
        return bool(made) if isinstance(found, bool) else made


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
