"""How long processes have run and have waited for a core, as Linux counts it (no jax).

A compile that shares two cores with other work takes twice as long, and is no worse for it. What
the kernel says of its threads tells that from a compile that hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Of all threads of some processes together, since these began.

    Attributes:
      ran_s: on a core.
      waited_s: ready to run, while others had the cores.
    """

    ran_s: float = 0.0
    waited_s: float = 0.0


def run_time_below(pid: int) -> RunTime:
    """Of the descendants of a process that live; zeros where the system does not count it."""
    pids: list[int] = []
    with contextlib.suppress(psutil.Error):
        pids = [one.pid for one in psutil.Process(pid).children(recursive=True)]
    counted = [count for one in pids for count in _counts(one)]
    return RunTime(
        ran_s=sum(ran for ran, _ in counted) / 1e9,
        waited_s=sum(waited for _, waited in counted) / 1e9,
    )


def _counts(pid: int) -> Iterable[tuple[int, int]]:
    """Nanoseconds that each thread of a process has run and has waited.

    The first two numbers of `/proc/PID/task/TID/schedstat` (Linux,
    Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError):  # It has ended meanwhile.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                ran, waited, *_ = map(int, (thread / "schedstat").read_text().split())
                yield ran, waited


def lost_s(before: RunTime, now: RunTime, elapsed_s: float) -> float:
    """Seconds by which processes are late because others had the cores.

    Threads that wait side by side are late once, not once each: the time for which they were ready
    to run, on average side by side, is as long as what has elapsed at the most.

    Args:
      before: when the time began to count.
      now: `elapsed_s` later.
    """
    ran_s = max(0.0, now.ran_s - before.ran_s)
    waited_s = max(0.0, now.waited_s - before.waited_s)
    if not waited_s:
        return 0.0
    return waited_s * min(1.0, elapsed_s / (ran_s + waited_s))
