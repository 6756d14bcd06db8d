"""What a worker keeps between jobs: scripts, lowered programs, plans that are ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import Plan
from automesh.program.execute.prepare import Ready
from automesh.program.execute.timed_loop import KeptLoops
from automesh.program.execute.value_domains import Domain
from automesh.program.nouns import Entry
from automesh.worker.handlers.propagate import Propagations
from automesh.worker.handlers.scripts import Scripts

ReadyKey = tuple[Entry, Plan, tuple[str, ...]]  # the script, the plan, its axis types


@dataclass(slots=True)
class WorkerMemory:
    """The state of a worker between jobs: loaded scripts, and plans that are ready to run.

    Attributes:
      domains: for each script, axes, axis types and mapping, the possible values of each leaf.
      programs: for each script, axes, knobs and devices, the shared parts of its lowerings; those
        used last are the last ones, see `MOST_CALLS`.
      kept: the states of plans that are visited in turn; all other arrays are freed after each job.
      first_build_s: seconds of the first `build` of a visit, with all its imports.
    """

    scripts: Scripts = field(default_factory=Scripts)
    ready: dict[ReadyKey, Ready] = field(default_factory=dict[ReadyKey, Ready])
    domains: dict[Any, tuple[Domain, ...]] = field(default_factory=dict[Any, tuple[Domain, ...]])
    programs: dict[Any, Propagations] = field(default_factory=dict[Any, Propagations])
    kept: KeptLoops = field(default_factory=KeptLoops)
    first_build_s: float = 0.0

    @property
    def start_s(self) -> float:
        """See `VisitAnswer`."""
        return self.scripts.took_s + self.first_build_s
