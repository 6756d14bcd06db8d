"""How long compiles in progress are waited for when the time is over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.ladder.compile_rung import CompileRung
from automesh.ladder.trials import Trial
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Failed
from automesh.results.progress import Silent
from automesh.worker.tasks import Finished

PLANS = [Plan(axes=parse_mesh(text)) for text in ("dp:8", "dp:4,tp:2", "tp:8")]
TURN_S = 5.0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Slow:
    """A pool whose jobs take as long as they take."""

    clock: Clock
    seconds: float
    running: dict[int, float] = field(default_factory=dict)
    tickets: int = 0

    def submit(self, job: Any, timeout_s: float, on_event: Any, *, fresh: bool) -> int:
        self.tickets += 1
        self.running[self.tickets] = self.clock.now_s + self.seconds
        return self.tickets

    def wait(self, timeout_s: float) -> list[Finished]:
        self.clock.now_s += TURN_S
        ended = [one for one, end_s in self.running.items() if end_s <= self.clock.now_s]
        for one in ended:
            del self.running[one]
        failed: Any = Failed(stage="build", reason="no")
        return [Finished(ticket=one, job=SimpleNamespace(), result=failed) for one in ended]  # pyright: ignore


@dataclass
class Memory:
    """A rung of a study that nobody else works on."""

    kept: list[Trial] = field(default_factory=list)

    def trials(self) -> list[Trial]:
        return list(self.kept)

    def adopt_expired(self) -> None: ...

    def give_all_back(self) -> None: ...

    def enqueue(self, plans: list[Plan], estimates: object) -> None:
        for plan in plans:
            number = len(self.kept)
            self.kept.append(
                Trial(
                    rung="compile",
                    number=number,
                    storage_id=number,
                    plan=plan,
                    state="waiting",
                    outcome=None,
                    owner=None,
                    attempts=0,
                    fingerprint="",
                    source_hash="",
                    versions=(),
                )
            )

    def claim(self) -> Trial | None:
        waiting = next((one for one in self.kept if one.is_waiting), None)
        if waiting is not None:
            self._put(replace(waiting, state="running"))
        return waiting

    def finish(self, trial: Trial, outcome: Any, *, fingerprint: str) -> None:
        self._put(replace(trial, state="finished", outcome=outcome))

    def _put(self, trial: Trial) -> None:
        self.kept[trial.number] = trial


def ended_s(seconds: float, *, is_first: bool) -> tuple[float, int]:
    """When the rung gives up, with 60 s until its deadline and 60 s of grace; compiles finished."""
    clock = Clock()
    rung: Any = CompileRung(
        preparation=SimpleNamespace(timeout_s=1e9, provenance=()),  # pyright: ignore
        notebook=SimpleNamespace(is_current=lambda _: True),  # pyright: ignore
        study=SimpleNamespace(lead=lambda: True, heartbeat=lambda: True),  # pyright: ignore
        pool=Slow(clock=clock, seconds=seconds),  # pyright: ignore
        progress=Silent(),
        rung=Memory(),  # pyright: ignore
        compiling=SimpleNamespace(job=lambda plan: plan),  # pyright: ignore
        choose=lambda _: PLANS,
        order=lambda plans, _: plans,
        estimates={},
        workers=1,
        deadline_s=60.0,
        clock=clock,
        grace_s=60.0,
        is_first=is_first,
    )
    done = rung.run()
    return clock.now_s, len(done)


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
