"""Stand-ins for what a compile rung works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from automesh.mesh.axes import Plan
from automesh.outcomes import Failed
from automesh.tuner.study.trials import Trial
from automesh.worker.pool import Finished

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

    def submit(
        self, job: Any, timeout_s: float, on_event: Any, *, fresh: bool, patient: bool
    ) -> int:
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

    def claim(self, first: Callable[[Plan], float] | None = None) -> Trial | None:
        there = [one for one in self.kept if one.is_waiting]
        if first is not None:
            there.sort(key=lambda one: first(one.plan))
        waiting = there[0] if there else None
        if waiting is not None:
            self._put(replace(waiting, state="running"))
        return waiting

    def finish(self, trial: Trial, outcome: Any, *, fingerprint: str) -> None:
        self._put(replace(trial, state="finished", outcome=outcome))

    def _put(self, trial: Trial) -> None:
        self.kept[trial.number] = trial
