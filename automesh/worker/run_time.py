"""Reads from Linux how long processes have run and how long they waited for a core (no jax).

A compile that shares two cores with other work takes twice as long, but does not hang. The kernel's
counters of its threads show the difference.
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
    """Processor time of some processes, summed over all threads since they began.

    Attributes:
      ran_s: seconds on a core.
      waited_s: seconds in which threads were ready to run but other threads, also of the same
        processes, had the cores.
      busy_s: seconds that all cores of the machine were busy with any work.
    """

    ran_s: float = 0.0
    waited_s: float = 0.0
    busy_s: float = 0.0


def run_time_below(pid: int) -> RunTime:
    """Returns the run time of the living descendants of a process; zeros if the system does not
    count it."""
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
    """Returns the time of virtual guests, which Linux also counts as user time (proc(5))."""
    return getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)


def _counts(pid: int) -> Iterable[tuple[int, int]]:
    """Yields, for each thread of a process, the nanoseconds that it has run and that it has waited.

    The first two numbers of `/proc/PID/task/TID/schedstat` (Linux,
    Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError):  # The process has ended.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                ran, waited, *_ = map(int, (thread / "schedstat").read_text().split())
                yield ran, waited


def lost_s(before: RunTime, now: RunTime, elapsed_s: float) -> float:
    """Returns the seconds by which processes are late because others had the cores.

    Threads that wait at the same time delay the process once, not once each. So the waiting time is
    divided by the number of threads that were ready to run on average, and is at most the elapsed
    time. It is also at most the time that others had the cores, since the rest was spent waiting
    for each other.

    Args:
      before: counters at the beginning.
      now: counters `elapsed_s` later.
    """
    ran_s = max(0.0, now.ran_s - before.ran_s)
    waited_s = max(0.0, now.waited_s - before.waited_s)
    if not waited_s:
        return 0.0
    others_s = max(0.0, now.busy_s - before.busy_s - ran_s)
    return min(others_s, waited_s * min(1.0, elapsed_s / (ran_s + waited_s)))
