"""The data that the page of a study shows beyond its result: nouns without behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from automesh.cost.replay.timeline import Timeline
from automesh.mesh.axes import Plan
from automesh.report.explain.nouns import Explained
from automesh.report.result import SearchResult

Section = Literal["explained", "rounds", "timelines", "placements", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedPlan:
    """A row of `estimates.csv` for a plan that never got a trial.

    Attributes:
      mesh: as text, `dp:2,tp:4`.
      settings: logical axes, knobs and compiler options as (name, text).
      step_s, bracket_s, memory_bytes: estimated; 0 where the plan has no estimate.
      causes: (cause, seconds), the largest first.
      reason: why it has no estimate; empty if it has one.
    """

    mesh: str
    settings: tuple[tuple[str, str], ...]
    step_s: float
    bracket_s: tuple[float, float]
    memory_bytes: int
    causes: tuple[tuple[str, float], ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """One time of one plan.

    Attributes:
      number: of the round, from 1, over all races and fresh processes in the order of time.
      where: `race 1` or `fresh processes`.
      plan: as text.
      step_s: seconds of a step.
    """

    number: int
    where: str
    plan: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldActivations:
    """The bytes of activations that a rank of a pipeline holds from a moment on."""

    rank: int
    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimeline:
    """One step of one plan, in time.

    Attributes:
      kind: `replay` of a compiled schedule on the links of the target, or `schedule` of a pipeline
        whose programs were priced by what they do.
      held: of a pipeline, what each rank holds over time.
    """

    plan: Plan
    kind: Literal["replay", "schedule"]
    timeline: Timeline
    held: tuple[HeldActivations, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The positions of one plan's devices.

    Attributes:
      axes: (name, size) in the order of the mesh; device i is element i of the flat mesh.
      granule: of each device that is drawn.
      place: of each, x, y, z and core on the torus; without one, its number in the last.
      devices: number of each device that is drawn.
    """

    plan: Plan
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    granule: tuple[int, ...]
    place: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The links between the devices of the target.

    Attributes:
      kind: `torus`, `switch` or `shared`.
      torus: chips along each dimension; empty without one.
      wraps: per dimension, whether its ends are linked.
      granules: slices or nodes, of which the first `drawn_granules` are drawn.
    """

    kind: str
    torus: tuple[int, ...]
    wraps: tuple[bool, ...]
    devices_per_chip: int
    granules: int
    drawn_granules: int
    granule_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The estimated bytes on a device at a point of the program that may be its peak."""

    source: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPage:
    """The content of the page of a study.

    Attributes:
      estimated: plans that have an estimate and no trial, or that could not be estimated.
      explained: the plans that are broken down, the best first.
      verdicts: of pairs of `explained`, by their places: why one of the two is faster.
      points: of each of `explained`, what may be the peak of memory, in the order of the program.
      left_out: why a part of the page is empty, a sentence each.
    """

    result: SearchResult
    estimated: tuple[EstimatedPlan, ...] = ()
    explained: tuple[Explained, ...] = ()
    verdicts: tuple[tuple[tuple[int, int], str], ...] = ()
    points: tuple[tuple[MemoryPoint, ...], ...] = ()
    rounds: tuple[MeasuredRound, ...] = ()
    timelines: tuple[DrawnTimeline, ...] = ()
    wiring: Wiring | None = None
    placements: tuple[Placed, ...] = ()
    left_out: Mapping[Section, str] | None = None
