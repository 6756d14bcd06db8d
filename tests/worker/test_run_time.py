"""How late a process is because others had the cores."""

from __future__ import annotations

import os
import time

import pytest

from automesh.worker.run_time import RunTime, lost_s, run_time_below


@pytest.mark.parametrize(
    ("ran", "waited", "busy", "elapsed", "lost"),
    [
        (300, 0, 300, 300, 0),  # Alone.
        (100, 200, 600, 300, 200),  # One thread, of three on each of two cores.
        (200, 400, 600, 300, 200),  # Two threads there: late once, not once each.
        (600, 4200, 600, 300, 0),  # Sixteen threads of its own on two cores.
        (10, 10, 600, 300, 10),  # It has worked for a while, and hangs.
        (0, 0, 600, 300, 0),
    ],
)
def test_late_is_what_others_have_made_it(
    ran: float, waited: float, busy: float, elapsed: float, lost: float
) -> None:
    before = RunTime(ran_s=5.0, waited_s=7.0, busy_s=1000.0)
    now = RunTime(ran_s=5.0 + ran, waited_s=7.0 + waited, busy_s=1000.0 + busy)
    assert lost_s(before, now, elapsed) == pytest.approx(lost)


def test_what_has_ended_is_not_missed() -> None:
    # A process that had counted more has ended since.
    assert lost_s(RunTime(ran_s=9.0, waited_s=9.0), RunTime(busy_s=50.0), 10.0) == 0.0
    assert run_time_below(2**22 - 1).ran_s == 0.0


def test_the_machine_is_busy_for_as_long_as_somebody_computes() -> None:
    before, begun = run_time_below(os.getpid()), time.monotonic()
    while time.monotonic() - begun < 0.3:
        pass
    assert run_time_below(os.getpid()).busy_s - before.busy_s > 0.1
