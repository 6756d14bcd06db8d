"""Reduces garbage collections while programs are traced and lowered.

Tracing makes hundreds of thousands of small objects that live as long as the program. Python looks
for cycles after every 700 of them, and jax runs a callback at each collection (`_xla_gc_callback`
in jax/_src/lib/__init__.py): together this takes a tenth of the time of a lowering.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# Number of new objects before a collection: some megabytes.
OBJECTS = 50_000
# Older objects are collected after three collections of younger ones, not after ten: arrays that
# `build` makes may be in reference cycles and should be freed soon.
_OLDER = (3, 3)


@contextmanager
def fewer_collections() -> Generator[None]:
    """Makes Python collect garbage rarely while the body runs; keeps thresholds that user code
    sets."""
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
