"""Reads the bytes needed and available from XLA's out-of-memory messages (no jax)."""

from __future__ import annotations

import re

SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"
# (needed, limit) of TPUs, of older libtpu.
_NEEDED_OF_LIMIT = (
    re.compile(rf"\({SIZE}\) exceeds available HBM \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
_NEEDED = (
    # A message of libtpu 0.0.41 about one array that is larger than the memory of a chip. It states
    # all of that memory, of which a program may use only a part.
    re.compile(rf"Allocation \(size={SIZE}\) would exceed memory"),
    # Messages of the allocators of GPUs and hosts.
    re.compile(rf"(?:allocate|allocating|alloc) (?:[a-z ]*?){SIZE}(?: bytes| of|\.|$)"),
    re.compile(rf"Out of memory[^\d]*{SIZE}"),
)
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needed_and_limit(text: str) -> tuple[int, int]:
    """Returns the bytes needed and available; 0 for a number that the text does not state.

    >>> needed_and_limit("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.")
    (4096, 0)
    >>> needed_and_limit("Allocation (size=549755813888) would exceed memory (size=17179869184)")
    (549755813888, 0)
    """
    for pattern in _NEEDED_OF_LIMIT:
        if match := pattern.search(text):
            return size_bytes(match[1], match[2]), size_bytes(match[3], match[4])
    found = [match for pattern in _NEEDED for match in pattern.finditer(text)]
    return max((size_bytes(match[1], match[2]) for match in found), default=0), 0


def size_bytes(number: str, unit: str) -> int:
    """Returns the number of bytes in a match of `SIZE`."""
    return int(float(number.rstrip(".")) * _SCALE[unit])
