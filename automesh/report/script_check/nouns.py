"""The results of `automesh check-script`, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.mesh.axes import Scalar
from automesh.program.step_summary import StepSummary

Sameness = Literal["same", "by hash seed", "differs", "not looked at"]
"""Whether two processes trace the same program: `by hash seed` if only processes with the same
seed do, since the order of a set decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reason why a search would not work, in a sentence, and what to do about it."""

    what: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobUse:
    """A keyword of `build`, a logical axis or a compiler option, and what a search does with it.

    Attributes:
      kind: its type, such as `str`; `logical axis` or `compiler option` for these.
      default: what `build` has; None if it does not say.
      values: what a search tries; empty if it leaves the default.
    """

    name: str
    kind: str
    default: Scalar | None
    values: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheck:
    """Whether a step is traced to the same program in every process.

    Attributes:
      detail: the first line that differs, in words; empty if none does, or none is known.
      hash_seed, other_seed: PYTHONHASHSEED of a search's workers, and of the second process.
    """

    found: Sameness
    detail: str
    hash_seed: str
    other_seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCount:
    """The number of plans that a search would have.

    Attributes:
      legal: plans that neither a rule of the space nor the step refuses, as far as it is known.
      built: those of `legal` on which the step was built, within the time of the check.
      ruled_out: pairs of a rule and the number of plans that it rules out.
    """

    enumerated: int
    legal: int
    built: int
    ruled_out: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedScript:
    """A script as a search would find it.

    Attributes:
      script: as the user gave it.
      target: the name that a rule would be for.
      mesh: that `step` is described on; empty if there is none.
      meshes: all on which the step could be traced.
      step: None if it could not be described.
      axes: of the search space, in order.
      used_axes: those that the step splits something over.
      searched_axes: those that are above 1 in a plan.
      axis_types: one per axis; empty for Auto.
      baseline: the mesh that is used today, in text form; empty if nobody says.
      tokens_per_step: 0 if nobody says.
      left_out: what of a shipped space does not apply to this step, one sentence each.
      plans: None if none could be enumerated.
      notes: what is worth knowing, one sentence each.
      problems: what must be mended before a search.
      command: that searches.
    """

    script: str
    function: str
    target: str
    platform: str = ""
    device: str = ""
    device_count: int = 0
    mesh: str = ""
    meshes: tuple[str, ...] = ()
    step: StepSummary | None = None
    axes: tuple[str, ...]
    used_axes: tuple[str, ...] = ()
    searched_axes: tuple[str, ...] = ()
    axis_types: tuple[str, ...] = ()
    baseline: str = ""
    facts: tuple[tuple[str, int], ...] = ()
    tokens_per_step: int = 0
    knobs: tuple[KnobUse, ...] = ()
    left_out: tuple[str, ...] = ()
    program: ProgramCheck
    plans: PlanCount | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    command: str
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether a search can begin."""
        return not self.problems
