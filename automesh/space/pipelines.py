"""Rules of pipelines: schedule, microbatches, and the mesh axis of the pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from automesh.mesh.axes import PIPELINE, Scalar
from automesh.mesh.plan_arrays import Sizes
from automesh.pipeline import SCHEDULES, find_refusal
from automesh.space.settings import integers_of

SCHEDULE = "schedule"
MICROBATCHES = "microbatches"
VIRTUAL_STAGES = "virtual_stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePipeline:
    """The rule that tries a mesh without a pipeline with one schedule: all are equal there.

    Attributes:
      usual: the first value of each knob that only pipelines have.
    """

    usual: Mapping[str, int]
    name: str = "schedule without a pipeline"
    factors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", (PIPELINE, *self.usual))

    def holds(self, values: Mapping[str, Sizes]) -> NDArray[np.bool_]:
        """Says which rows of `values` are no repetition."""
        is_usual = [values[name] == one for name, one in self.usual.items()]
        return (values[PIPELINE] > 1) | np.logical_and.reduce(is_usual)

    def detail(self, values: Mapping[str, int]) -> str:
        """Says which knobs of a plan have no effect."""
        del values
        knobs = " and ".join(f"`{name}`" for name in self.usual)
        return f"{PIPELINE} is 1, where {knobs} change nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """The rule that the schedule exists for the ranks, stages and microbatches of the plan."""

    factors: tuple[str, ...]
    name: str = "schedule for pp and microbatches"

    def holds(self, values: Mapping[str, Sizes]) -> NDArray[np.bool_]:
        """Says which rows of `values` have a schedule."""
        columns = np.stack([np.atleast_1d(values[name]) for name in self.factors], axis=1)
        distinct, rows = np.unique(columns, axis=0, return_inverse=True)
        fits = [not self._refusal(one) for one in distinct.tolist()]
        return np.array(fits, np.bool_)[rows.reshape(values[PIPELINE].shape)]

    def detail(self, values: Mapping[str, int]) -> str:
        """Says why a plan has no schedule."""
        return self._refusal([values[name] for name in self.factors])

    def _refusal(self, numbers: Iterable[int]) -> str:
        named = dict(zip(self.factors, numbers, strict=True))
        ranks = named[PIPELINE]
        if ranks == 1:
            return ""
        stages = ranks * named[VIRTUAL_STAGES] if VIRTUAL_STAGES in named else None
        return find_refusal(
            SCHEDULES[named[SCHEDULE]],
            num_ranks=ranks,
            num_microbatches=named[MICROBATCHES],
            num_stages=stages,
        )


def numbers_of(knobs: Iterable[tuple[str, Scalar]]) -> dict[str, int]:
    """Returns the values that rules read: integer knobs, and the number of a named schedule."""
    pairs = tuple(knobs)
    found = integers_of(pairs)
    named = dict(pairs).get(SCHEDULE)
    if isinstance(named, str) and named in SCHEDULES:
        found[SCHEDULE] = SCHEDULES.index(named)
    return found


def rules_of_pipelines(
    axes: Collection[str], knobs: Mapping[str, Collection[Scalar]]
) -> tuple[OnePipeline | Runnable, ...]:
    """Makes the rules of a space with pipelines; none if it has no axis `pp`.

    Args:
      axes: the names of the varying axes.
      knobs: knobs of `build` and their values in the search, the usual one first.
    """
    schedules = knobs.get(SCHEDULE, ())
    if (
        PIPELINE not in axes
        or not schedules
        or not all(schedule in SCHEDULES for schedule in schedules)
    ):
        return ()
    alone = [name for name in (SCHEDULE, VIRTUAL_STAGES) if name in knobs]
    usual = numbers_of((name, next(iter(knobs[name]))) for name in alone)
    rules: list[OnePipeline | Runnable] = [OnePipeline(usual=usual)]
    if MICROBATCHES in knobs:
        rules.append(Runnable(factors=(PIPELINE, MICROBATCHES, *alone)))
    return tuple(rules)
