"""Searches that go on with a study whose circumstances have changed, or that was cut off badly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automesh.tuner.measure.known import Known
from automesh.tuner.study import lease
from tests.tuner.measure.test_rung import BASE, A, B, C, D, LuckyPool, Scene
from tests.tuner.measure.test_schedule import CRASH


@pytest.fixture(params=[2**50, 1], ids=["in turns", "one by one"])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Scene]:
    def make(step_s: dict[Any, float], **machine: Any) -> Scene:
        pool = LuckyPool(step_s=step_s, **machine)
        return Scene(folder=tmp_path, pool=pool, room_bytes=request.param)

    return make


def test_the_winner_becomes_the_baseline(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.12}, spread=0.005)
    found = here.search(600.0)
    assert found is not None and found.winner == A
    here.baseline = (A,)
    found = here.search(600.0)
    assert found is not None and found.winner == A


@pytest.mark.slow
def test_killed_behind_a_race_then_another_baseline(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.12, C: 0.14}, spread=0.005)

    def killed(*_: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Known, "close", killed)
        with pytest.raises(SystemExit):
            here.search(600.0)
    here.baseline = (C,)
    assert here.search(600.0) is not None


@pytest.mark.slow
def test_what_was_cut_is_raced_again_on_a_machine_that_was_started_anew(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scene({BASE: 0.1, A: 0.08, B: 0.13}, spread=0.01)
    for budget_s in (30.0, 40.0, 45.0, 50.0, 55.0, 60.0):
        here.search(budget_s)
        if here.records().races:
            break
    assert here.records().races
    monkeypatch.setattr(lease, "_machine", lambda: "another")
    found = here.search(600.0)
    assert found is not None and found.winner == A


def test_what_was_decided_stays_so_on_a_machine_that_was_started_anew(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scene({BASE: 0.1, A: 0.08, B: 0.13}, spread=0.01)
    assert here.search(600.0) is not None
    monkeypatch.setattr(lease, "_machine", lambda: "another")
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert here.endings[-1] != "no finalist could be measured"


def test_what_ran_in_fresh_processes_and_lost_its_first_visit_is_visited_and_judged_anew(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another machine has visited plans, and raced none, before this one goes on."""
    here = scene({BASE: 0.1, A: 0.095, B: 0.13}, spread=0.03)
    assert here.search(60.0) is not None
    assert any(A in dict(one.seconds) for one in here.records().processes)
    take_over = Known._take_over

    def without(self: Any, stored: Any) -> None:
        kept = tuple(one for one in stored.calibrations if one.plan != A)
        take_over(self, replace(stored, calibrations=kept))

    with monkeypatch.context() as patch:
        patch.setattr(Known, "_take_over", without)
        found = here.search(600.0)
        assert found is not None and found.winner == A
    before = here.pool.visits_to(A)
    assert here.search(600.0) is not None
    assert here.pool.visits_to(A) == before  # its first visit was stored


def test_a_smaller_space_without_the_winner(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.115, C: 0.14}, spread=0.005)
    found = here.search(600.0)
    assert found is not None and found.winner == A
    del here.pool.truth[A]
    here.outside = frozenset({str(A)})
    for _ in range(3):
        found = here.search(600.0)
    assert found is not None and found.winner == B


def test_a_crash_with_no_time_for_a_retry_is_no_verdict_on_who_ran_before(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.1, A: 0.08, B: 0.1}, spread=0.005)
    if here.room_bytes != 1:
        pytest.skip("visits in turns are not repeated")
    late = 6
    here.pool.script = {(A, late): CRASH}
    here.pool.hangs = {(A, late + 1)}  # the other try: a fresh process takes longer than is left
    here.search(60.0)
    found = here.search(900.0)
    assert found is not None and found.winner == A


def test_a_first_visit_that_time_cuts_ends_the_search(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scene({BASE: 0.1, A: 0.095, B: 0.13}, spread=0.03)
    assert here.search(75.0) is not None
    take_over = Known._take_over

    def forgetting(self: Any, stored: Any) -> None:
        take_over(self, stored)
        self.calibrations.pop(A, None)  # as if its program had changed

    tries: list[Any] = []
    fail = Known.add_failures

    def counted(self: Any, plans: Any) -> None:
        tries.append(plans)
        assert len(tries) < 50, "it goes round and round"
        fail(self, plans)

    monkeypatch.setattr(Known, "_take_over", forgetting)
    monkeypatch.setattr(Known, "add_failures", counted)
    here.pool.hangs = {(A, here.pool.visits_to(A) + number) for number in range(3)}
    here.search(60.0)


def test_a_reference_that_time_was_too_short_for_is_not_said_to_be_impossible(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.1, A: 0.08, B: 0.1, C: 0.12})
    here.finalists = (BASE, A, B)
    assert here.search(600.0) is not None
    here.baseline, here.finalists = (C,), (BASE, A, B, C)
    single = replace(BASE, axes=tuple(replace(axis, ici=1) for axis in BASE.axes))
    here.pool.hangs = {
        (plan, here.pool.visits_to(plan) + number)
        for plan in (C, single, BASE)
        for number in range(3)
    }
    here.notices.clear()
    here.search(60.0)
    with here.open() as study:
        assert "could run the step" not in here.notebook(study).reference()
    assert len(here.notices) == len(set(here.notices))


def test_who_was_beaten_by_one_that_then_fails_is_tried_again(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.115, C: 0.14, D: 0.15}, spread=0.005)
    ran = here.pool.run

    def run(job: Any, timeout_s: float) -> Any:
        answer = ran(job, timeout_s)
        # It crashes in all processes but that of the race.
        return CRASH if job.plan == A and here.records().races else answer

    here.pool.run = run  # type: ignore[method-assign]
    found = here.search(900.0)
    assert found is not None and found.winner == B


def test_a_search_without_time_to_compile_a_plan_keeps_its_first_visit(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.12}, spread=0.005)
    here.uncompiled = frozenset((B,))
    for budget_s in (10.0, 15.0, 20.0, 25.0, 30.0):
        here.search(budget_s)
        if here.visits():
            break
    assert here.visits() == {BASE, A}
    here.uncompiled = frozenset((A,))
    here.search(60.0)
    assert here.visits() == {BASE, A, B}
