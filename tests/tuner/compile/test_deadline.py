"""How long compiles in progress are waited for when the time is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import CompileAnswer, Lowered
from automesh.report.progress import Silent
from automesh.tuner.compile import rung as compile_rung
from automesh.tuner.compile.memory_limit import NO_LIMIT
from automesh.tuner.compile.rung import CompileRung
from automesh.worker.pool import Finished
from tests.support.fakes.compile_rung import TURN_S, Clock, Memory, Slow
from tests.support.samples.storage_cases import compiled

PLANS = [Plan(axes=parse_mesh(text)) for text in ("dp:8", "dp:4,tp:2", "tp:8")]


def rung_of(
    clock: Clock,
    pool: Slow,
    memory: Memory,
    *,
    is_first: bool,
    workers: int = 1,
    plans: Sequence[Plan] = PLANS,
) -> Any:
    """A rung with 60 s until its deadline and 60 s of grace."""
    return CompileRung(
        search=SimpleNamespace(  # pyright: ignore
            preparation=SimpleNamespace(timeout_s=1e9, provenance=(), device_memory=NO_LIMIT),  # pyright: ignore
            notebook=SimpleNamespace(is_current=lambda _: True),  # pyright: ignore
            study=SimpleNamespace(lead=lambda: True, heartbeat=lambda: True),  # pyright: ignore
            progress=Silent(),
            estimates=SimpleNamespace(found={}),
            workers=workers,
            clock=clock,
        ),
        pool=pool,  # pyright: ignore
        rung=memory,  # pyright: ignore
        compiling=SimpleNamespace(job=lambda plan: plan),  # pyright: ignore
        choose=lambda _: plans,
        order=lambda plans, _: plans,
        deadline_s=60.0,
        grace_s=60.0,
        is_first=is_first,
    )


def ended_s(seconds: float, *, is_first: bool) -> tuple[float, int]:
    """When the rung gives up, with 60 s until its deadline and 60 s of grace; compiles finished."""
    clock = Clock()
    rung = rung_of(clock, Slow(clock=clock, seconds=seconds), Memory(), is_first=is_first)
    done = rung.run()
    return clock.now_s, len(done)


class Elsewhere(Memory):
    """A rung whose open trials another process has."""

    def claim(self, first: object = None) -> None:
        return None


def test_who_gets_nothing_to_do_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_rung, "POLL_S", 0.0)
    clock = Clock()
    rung = rung_of(clock, Slow(clock=clock, seconds=1.0), Elsewhere(), is_first=True)
    assert rung.run() == {}
    assert 120.0 < clock.now_s <= 120.0 + 2 * TURN_S


class SameProgram(Slow):
    """Two workers of which one has failed to compile the program that the other leaves to it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock, seconds=1.0)
        self.events: list[Any] = []

    def submit(
        self, job: Any, timeout_s: float, on_event: Any, *, fresh: bool, patient: bool
    ) -> int:
        ticket = super().submit(job, timeout_s, on_event, fresh=fresh, patient=patient)
        self.events.append(on_event({"fingerprint": "f00d"}))
        return ticket

    def wait(self, timeout_s: float) -> list[Finished]:
        waited = super().wait(timeout_s)
        # What was told to leave it comes after the failure of who was told to go on.
        return [
            one
            if self.events[one.ticket - 1]["go"]
            else replace(one, result=Lowered(fingerprint="f00d"))
            for one in waited
        ]


def test_a_program_is_not_waited_for_whose_compile_has_failed() -> None:
    clock = Clock()
    # Two, since a third with that program would wake who waits for it.
    two = PLANS[:2]
    rung = rung_of(clock, SameProgram(clock), Memory(), is_first=True, workers=2, plans=two)
    assert set(rung.run()) == set(two)
    assert clock.now_s < 60.0


@pytest.mark.parametrize(
    ("seconds", "is_first", "expected"),
    [
        (20.0, True, (60.0, 3)),
        (100.0, True, (100.0, 1)),  # within the grace
        (400.0, True, (400.0, 1)),  # the first of all is waited for
        (400.0, False, (125.0, 0)),  # one that is not can be left for the next run
        (50.0, True, (100.0, 2)),
    ],
)
def test_what_is_waited_for(seconds: float, is_first: bool, expected: tuple[float, int]) -> None:
    assert ended_s(seconds, is_first=is_first) == expected


class Compiles(Slow):
    """A pool whose jobs compile their programs."""

    def wait(self, timeout_s: float) -> list[Finished]:
        one = compiled(1e-3)
        answer = CompileAnswer(
            fingerprint="", memory=one.memory, counts=one.counts, compile_s=self.seconds
        )
        return [replace(ended, result=answer) for ended in super().wait(timeout_s)]  # pyright: ignore


def test_the_first_compile_is_told_once_with_what_is_left() -> None:
    clock = Clock()
    rung = rung_of(clock, Compiles(clock=clock, seconds=20.0), Memory(), is_first=True)
    rung.compiling.outcome = lambda *_: compiled(1e-3)
    told: list[tuple[float, int]] = []
    rung.on_first = lambda compile_s, left: told.append((compile_s, left))
    assert len(rung.run()) == 3
    assert told == [(20.0, 2)]


class Uneven(Slow):
    """A pool with two workers, of which the second takes longer than the first."""

    second_s: float = 0.0

    def submit(
        self, job: Any, timeout_s: float, on_event: Any, *, fresh: bool, patient: bool
    ) -> int:
        ticket = super().submit(job, timeout_s, on_event, fresh=fresh, patient=patient)
        if ticket == 2:
            self.running[ticket] = self.clock.now_s + self.second_s
        return ticket


@pytest.mark.parametrize(
    ("second_s", "is_first", "expected"),
    [
        (230.0, True, (230.0, 2)),
        (300.0, True, (265.0, 1)),  # the second is waited for as long again as the first one took
        (230.0, False, (125.0, 0)),
    ],
)
def test_a_second_plan_is_waited_for(
    second_s: float, is_first: bool, expected: tuple[float, int]
) -> None:
    """A search ended with its baseline alone, whose rival was compiled a second later."""
    clock = Clock()
    pool = Uneven(clock=clock, seconds=130.0)
    pool.second_s = second_s
    rung = rung_of(clock, pool, Memory(), is_first=is_first, workers=2, plans=PLANS[:2])
    rung.search.legal = SimpleNamespace(baseline=())  # pyright: ignore
    assert (len(rung.run()), clock.now_s) == expected[::-1]
