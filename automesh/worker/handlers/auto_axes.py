"""Runs a script once more, with Auto axes, where it fails with the axes that jax makes (jax)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from automesh.errors import UsageError
from automesh.program.absent import unsaid_axes
from automesh.program.capture.nouns import Discovery
from automesh.program.capture.world import told


def with_its_axes(discovered: Callable[[], Discovery], again: Callable[[str], None]) -> Discovery:
    """Returns what the first run of a script shows. If it fails on Explicit axes whose types it
    left to `jax.make_mesh`, it is run once more with Auto ones.

    Args:
      discovered: runs the script.
      again: is called with the reason before the script is started a second time.

    Raises:
      UsageError: it fails with both, and the error is that of the first run; or it wants another
        number of devices.
    """
    try:
        return discovered()
    except UsageError as error:
        failed_at = told.failed_at()
        if not told.refuses_axes() or told.wanted_devices():
            raise
        first = error
    again("with Auto axes")
    try:
        with unsaid_axes.unsaid_axes(are_auto=True):
            found = discovered()
    except UsageError as error:
        if told.wanted_devices() or error.message == first.message:
            raise
        if failed_at is not None:
            told.fail_at(*failed_at)
        raise UsageError(f"{first.message}; with Auto axes, {error.message}") from error
    return replace(
        found,
        capture=replace(found.capture, makes_auto=True),
        notices=(*found.notices, unsaid_axes.in_words(first.message)),
    )
