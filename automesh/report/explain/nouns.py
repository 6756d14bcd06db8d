"""The nouns of an explanation: one mesh, or two side by side."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.cost.breakdown import MeshCost
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Measured, ReplayOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Everything that is known of one plan.

    Attributes:
      cost: the estimate in its pieces.
      estimated: the estimate as the search ranks it.
      compiled, measured: what the study holds beyond the estimate.
      failure: why it could not be compiled or run, in words; empty if nothing is known against it.
      is_borrowed: True if the terms are those of other sizes, which do not hold here for certain.
      placement: per axis, the physical dimensions of the torus that it lies along, in words.
    """

    plan: Plan
    cost: MeshCost
    estimated: Estimated
    compiled: Compiled | None = None
    measured: Measured | None = None
    failure: str = ""
    is_borrowed: bool = False
    placement: tuple[str, ...] = ()

    @property
    def replay(self) -> ReplayOutcome | None:
        """The replay of the compiled program's schedule on the links of the target."""
        return self.compiled.replay if self.compiled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The content of what `explain` prints.

    Attributes:
      speeds: where the speeds behind the estimates come from, in words.
      one: the mesh that was asked for.
      against: the one that it is compared with, or None.
      notices: what the user should know, one sentence each.
      study: where the study is kept; empty for a script without one.
    """

    workload: str
    target: str
    device: str
    device_count: int
    speeds: str
    one: Explained
    against: Explained | None
    notices: tuple[str, ...] = ()
    study: str = ""
