"""The study's nouns: a trial and the rounds measured so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated, Outcome
from automesh.tuner.study.lease import Owner

RungName = Literal["screen", "compile", "measure"]
State = Literal["waiting", "running", "done", "raced_out", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a race for one plan.

    Attributes:
      number: of the round, from 0.
      samples_s: seconds per step, one per sample, in order.
      machine: where it ran, as `Owner.machine`: rounds of different machines must not be mixed.
    """

    number: int
    samples_s: tuple[float, ...]
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan on one rung, as the storage had it when it was read.

    Attributes:
      rung: screen (compiled at low effort), compile or measure.
      number: from 0, in the order of enqueueing; best first as long as the ladder enqueues so.
      storage_id: the storage's own key of the trial.
      plan: what is tried.
      state: waiting and running trials may change, the others never do.
      outcome: what became of the plan; None while waiting or running.
      owner: who runs or ran it; None if nobody has yet.
      attempts: how often it was begun; more than 1 after a kill, which the plan may have caused.
      fingerprint: of the program; empty until it is known.
      source_hash: of the script that the trial was enqueued for.
      versions: of everything whose change makes the figures stale, as name and version.
      rounds: those measured so far, in order; a race that was killed goes on from them.
      estimated: what was estimated before it was enqueued; None if nothing was.
      run: which of several runs of the plan it is; empty where a plan has one trial.
    """

    rung: RungName
    number: int
    storage_id: int
    plan: Plan
    state: State
    outcome: Outcome | None
    owner: Owner | None
    attempts: int
    fingerprint: str
    source_hash: str
    versions: tuple[tuple[str, str], ...]
    rounds: tuple[Round, ...] = ()
    estimated: Estimated | None = None
    run: str = ""

    @property
    def is_waiting(self) -> bool:
        return self.state == "waiting"

    @property
    def is_open(self) -> bool:
        """Whether the trial waits or runs: it may still change."""
        return self.state in ("waiting", "running")

    def medians_s(self, machine: str) -> tuple[float, ...]:
        """Returns the seconds per step of each round that was measured on `machine`."""
        here = [one for one in self.rounds if one.machine == machine]
        return tuple(sorted(one.samples_s)[len(one.samples_s) // 2] for one in here)

    def matches(self, source_hash: str, versions: tuple[tuple[str, str], ...]) -> bool:
        """Whether the figures hold for this script and these versions; if not, it is stale."""
        return self.source_hash == source_hash and self.versions == versions
