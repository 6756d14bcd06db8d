"""Fewer collections of garbage while programs are traced and lowered.

Tracing makes hundreds of thousands of small objects that live as long as the program. Python then
looks for cycles among them every 700 objects, and jax has a callback of its own for each such look
(`_xla_gc_callback` in jax/_src/lib/__init__.py): together a tenth of the time of a lowering.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# Some megabytes of small objects that may wait for a collection.
OBJECTS = 50_000
# Old objects are looked at after so many collections of younger ones, not after ten: arrays that
# `build` makes may hang in cycles, and shall not wait for long.
_OLDER = (3, 3)


@contextmanager
def fewer_collections() -> Generator[None]:
    """While it lasts, Python collects garbage seldom; what user code sets itself, it keeps."""
    before = gc.get_threshold()
    if not 0 < before[0] < OBJECTS:
        yield
        return
    during = (OBJECTS, *_OLDER)
    gc.set_threshold(*during)
    try:
        yield
    finally:
        if gc.get_threshold() == during:
            gc.set_threshold(*before)
