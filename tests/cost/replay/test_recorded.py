"""Recorded modules of each backend, replayed."""

from __future__ import annotations

import json

import pytest

from automesh.cost.replay.trace import trace_json
from tests.cost.replay.test_trace import check
from tests.support.cases.replay_golden import ALL, CASES, FOLDER, Recorded, replayed


@pytest.mark.parametrize("name", CASES)
def test_replays_are_as_before(name: str) -> None:
    """`python -m tests.regenerate.update_golden` writes them anew."""
    assert CASES[name]() == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_holds_for_all(one: Recorded) -> None:
    result, timeline = replayed(one)
    step = result.step_s
    assert sum(seconds for _, seconds in result.causes) == pytest.approx(step, rel=1e-9)
    assert all(seconds <= step for _, seconds in result.busy_s)
    assert result.bracket_s[0] <= step <= result.bracket_s[1]
    exposed = sum(
        seconds for name, seconds in result.causes if name.split()[0] in ("ici", "dcn", "host")
    )
    assert exposed <= sum(seconds for _, seconds in result.communication_s)
    assert 0.0 <= result.mfu < 1.0
    check(json.loads(trace_json(timeline, name=one.name)))


FIGURES = ("link_bytes_per_s", "dcn_bytes_per_s", "hbm_bytes_per_s", "peak_flops_per_s")


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_faster_hardware_never_makes_a_step_slower(one: Recorded) -> None:
    step_s = replayed(one)[0].step_s
    faster = {figure: replayed(one, figure)[0].step_s for figure in FIGURES}
    assert all(seconds <= step_s for seconds in faster.values())
    assert min(faster.values()) < step_s
