"""Writes notes to the worker's log, for example on a fallback that was used (no jax)."""

from __future__ import annotations

import contextlib
import sys


def note(text: str) -> None:
    """Writes one line to stderr, which a worker sends to its log."""
    with contextlib.suppress(Exception):  # The script may have replaced stderr by anything.
        sys.stderr.write(f"automesh: {text}\n")
        sys.stderr.flush()
