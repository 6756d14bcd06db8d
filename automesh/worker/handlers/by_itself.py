"""Finds out whether a script also fails without automesh, by running it once alone (jax)."""

from __future__ import annotations

from automesh.errors import UsageError
from automesh.program.absent.device_queries import own
from automesh.program.capture.world import told
from automesh.program.capture.world.by_itself import run_by_itself
from automesh.program.nouns import Entry

# Limits of the run alone in seconds: a process has to start, and Python runs under a tracer.
_LEAST_S, _MOST_S, _TIMES = 20.0, 120.0, 4.0


def blamed(error: UsageError, entry: Entry, took_s: float) -> UsageError:
    """Returns the same error, with a hint that says whether the script also fails alone.

    Args:
      took_s: seconds that the failed run took.
    """
    place = told.failed_at()
    if place is None:
        return error
    limit_s = min(max(_TIMES * took_s, _LEAST_S), _MOST_S)
    verdict = run_by_itself(entry, *place, limit_s=limit_s)
    command, count = entry.by_itself, len(own())
    devices = "one virtual CPU device" if count == 1 else f"{count} virtual CPU devices"
    # A mesh of `(jax.device_count() // 2, 2)` has no devices here.
    more = "; name the devices of the training: `--target cpu:8`" if count == 1 else ""
    if verdict.what == "fails":
        is_same = verdict.error in error.message
        why = ", with the same error" if is_same else f": {verdict.error}"
        hint = f"`{command}` fails by itself, too, on {devices}{why}{more}"
    elif verdict.what == "passes":
        hint = (
            f"`{command}` goes past that line by itself, on {devices}: it fails "
            "only as automesh runs it; write a function `build(mesh)` that returns the step and "
            "its arguments"
        )
    else:
        hint = (
            f"`{command}` was run by itself for {limit_s:.0f} s on {devices}, "
            "and had not reached that line"
        )
    return UsageError(error.message, hint=hint)
