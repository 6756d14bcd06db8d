"""Writes notes to the worker's log, for example on a fallback that was used (no jax)."""

from __future__ import annotations

import contextlib
import sys


def note(text: str) -> None:
    """Writes one line to stderr, which a worker sends to its log."""
    with contextlib.suppress(Exception):  # The script may have replaced stderr by anything.
        sys.stderr.write(f"automesh: {text}\n")
        sys.stderr.flush()


def in_one_line(error: BaseException) -> str:
    """Returns `ValueError: the first line of its message`; the type alone if it has no message, as
    that of `assert len(devices) == 8`."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
