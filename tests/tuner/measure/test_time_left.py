"""How many passes a process makes in the time that is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from automesh.tuner.measure.fresh_processes import show_rows
from automesh.tuner.measure.time_left import TimeLeft


@pytest.mark.parametrize(
    ("left_s", "count", "passes"),
    [
        (1000.0, 0, 8),
        (5 * 18.0, 0, 8),  # exactly five processes of eight passes up to the first look
        (5 * 17.9, 0, 6),
        (5 * 13.9, 0, 4),
        (2 * 18.0, 5, 8),  # two more up to the second look
        (2 * 17.9, 5, 6),
        (1.0, 5, 2),
        (1.0, 0, 2),
    ],
)
def test_passes_are_two_fewer_until_the_processes_up_to_the_next_look_are_over_in_time(
    left_s: float, count: int, passes: int
) -> None:
    time_left = SimpleNamespace(
        now_s=100.0, end_s=100.0 + left_s, process_s=lambda entrants, passes: 2.0 + 2.0 * passes
    )
    final = SimpleNamespace(count=lambda *entrants: count)
    assert TimeLeft.passes(cast("Any", time_left), cast("Any", final), ["a"]) == passes  # type: ignore[list-item]


@pytest.mark.parametrize(("count", "total"), [(0, 5), (4, 5), (5, 7), (39, 40), (40, 40), (41, 40)])
def test_progress_is_towards_the_next_look(count: int, total: int) -> None:
    shown: list[dict[str, Any]] = []
    progress = SimpleNamespace(phase=lambda _, **values: shown.append(values))
    show_rows(cast("Any", progress), count, "of two plans")
    assert shown == [{"total": total, "done": count, "note": "of two plans"}]
