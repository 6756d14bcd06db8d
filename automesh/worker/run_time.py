"""How long processes have run and have waited for a core, as Linux counts it (no jax).

A compile that shares two cores with other work takes twice as long, and is no worse for it. What
the kernel says of its threads tells that from a compile that hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Of all threads of some processes together, since these began.

    Attributes:
      ran_s: on a core.
      waited_s: ready to run, while other threads had the cores: their own ones among them.
      busy_s: of all cores of the machine, with whatever.
    """

    ran_s: float = 0.0
    waited_s: float = 0.0
    busy_s: float = 0.0


def run_time_below(pid: int) -> RunTime:
    """Of the descendants of a process that live; zeros where the system does not count it."""
    pids: list[int] = []
    with contextlib.suppress(psutil.Error):
        pids = [one.pid for one in psutil.Process(pid).children(recursive=True)]
    counted = [count for one in pids for count in _counts(one)]
    return RunTime(
        ran_s=sum(ran for ran, _ in counted) / 1e9,
        waited_s=sum(waited for _, waited in counted) / 1e9,
        busy_s=_busy_s(),
    )


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - _counted_twice(times)


def _counted_twice(times: Any) -> float:
    """What guests of a virtual machine had is in the time of the user, too (proc(5))."""
    return getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)


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
    to run, on average side by side, is as long as what has elapsed at the most. What they waited
    for each other is no more than what is left without the time that others had.

    Args:
      before: when the time began to count.
      now: `elapsed_s` later.
    """
    ran_s = max(0.0, now.ran_s - before.ran_s)
    waited_s = max(0.0, now.waited_s - before.waited_s)
    if not waited_s:
        return 0.0
    others_s = max(0.0, now.busy_s - before.busy_s - ran_s)
    return min(others_s, waited_s * min(1.0, elapsed_s / (ran_s + waited_s)))
