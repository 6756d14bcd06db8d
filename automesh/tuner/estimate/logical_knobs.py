"""Finds which arrays logical axes split at other knobs than the defaults, which may change
sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.errors import AutomeshError
from automesh.mesh.axes import Knobs, Scalar
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.nouns import Inspection
from automesh.report.progress import Progress
from automesh.space.mapping import KnobArrays, SplitArray, StepMapping
from automesh.space.settings import StepFacts, default_first, known_knobs
from automesh.space.space import Knob, SearchSpace
from automesh.tuner.worker_errors import refuse_to_blame
from automesh.worker.messages import ArraysJob, InspectJob
from automesh.worker.pool import Pool

# Up to this many combinations of knobs all are examined, at some tenths of a second each.
LEAST = 16
# Most combinations of the knobs that change arrays; plans with others are checked by building them.
MOST = 64


def with_knobs(
    pool: Pool,
    job: InspectJob,
    inspection: Inspection,
    space: SearchSpace,
    progress: Progress,
    *,
    timeout_s: float,
) -> Inspection:
    """Adds to an inspection the arrays that logical axes split at every combination of knobs.

    If there are more than `LEAST` combinations, a knob that changes no array by itself is assumed
    to change none together with others.

    Args:
      job: the job that the inspection answers.

    Raises:
      UsageError: a user's own space has a knob that `build` does not take.
    """
    step = inspection.mapping
    facts = StepFacts(knobs=inspection.knobs, takes_any_knob=inspection.takes_any_knob)
    knobs = known_knobs(space, facts, [])
    if step is None or step.unseen or not space.mapping or not knobs:
        return inspection
    order = ArraysJob(
        step=replace(job.step, axis_types=inspection.axis_types),
        axis_names=job.axis_names,
        knobs=(),
        mapping=job.mapping,
        platform=job.platform,
    )
    progress.now("looking at what the knobs do to the arrays")
    looker = _Looker(pool=pool, order=order, timeout_s=timeout_s, defaults=inspection.knobs)
    looker.known[looker.key(())] = step
    found = _by_knobs(looker, step, knobs)
    if len(found) == MOST:
        progress.notice(
            f"what logical axes split was looked at for {MOST} combinations of knobs; with others, "
            "combinations of [mapping] are not checked before they are built"
        )
    return replace(inspection, mapping=replace(step, by_knobs=found))


@dataclass(slots=True, kw_only=True)
class _Looker:
    """Asks workers for the arrays of several combinations in parallel, and for each only once."""

    pool: Pool
    order: ArraysJob
    timeout_s: float
    defaults: Knobs
    known: dict[object, StepMapping] = field(default_factory=dict[object, StepMapping])

    def key(self, knobs: Knobs) -> object:
        """Returns the arguments of `build` as text, since True == 1 would be equal keys."""
        whole = {**dict(self.defaults), **dict(knobs)}
        return tuple(sorted((name, repr(value)) for name, value in whole.items()))

    def look(self, combinations: Sequence[Knobs]) -> list[StepMapping]:
        """Returns the arrays of the step at each combination."""
        orders = {
            self.key(combination): replace(self.order, knobs=combination)
            for combination in combinations
        }
        tickets = {
            self.pool.submit(order, self.timeout_s): key
            for key, order in orders.items()
            if key not in self.known
        }
        while tickets:
            for finished in self.pool.wait():
                key = tickets.pop(finished.ticket, None)
                if key is not None:
                    self.known[key] = _read(finished.result)
        return [self.known[self.key(combination)] for combination in combinations]


def _by_knobs(looker: _Looker, step: StepMapping, knobs: Sequence[Knob]) -> tuple[KnobArrays, ...]:
    defaults = dict(looker.defaults)
    values: dict[str, Sequence[Scalar]] = {
        knob.name: default_first(knob, defaults.get(knob.name, knob.values[0])) for knob in knobs
    }
    if math.prod(map(len, values.values())) > LEAST:
        values = _knobs_that_change_arrays(looker, step, values)
    chosen = itertools.islice(itertools.product(*values.values()), MOST)
    combinations = [tuple(zip(values, one, strict=True)) for one in chosen]
    found = looker.look(combinations)
    if not any(_differs(one, step) for one in found):
        return ()
    return tuple(
        KnobArrays(knobs=combination, arrays=one.arrays, unseen=one.unseen)
        for combination, one in zip(combinations, found, strict=True)
    )


def _knobs_that_change_arrays(
    looker: _Looker, step: StepMapping, values: Mapping[str, Sequence[Scalar]]
) -> dict[str, Sequence[Scalar]]:
    """Returns the knobs that change arrays while all others are at their defaults, with their
    values."""
    alone = [((name, value),) for name, listed in values.items() for value in listed]
    telling = {
        changed[0][0]
        for changed, found in zip(alone, looker.look(alone), strict=True)
        if _differs(found, step)
    }
    return {name: listed for name, listed in values.items() if name in telling}


def _differs(found: StepMapping, step: StepMapping) -> bool:
    return bool(found.unseen) or _splits(found.arrays) != _splits(step.arrays)


def _read(result: object) -> StepMapping:
    refuse_to_blame(result)
    match result:
        case StepMapping():
            return result
        case Failed():
            return StepMapping(unseen=result.reason)
        case TimedOut():
            return StepMapping(unseen=f"not done within {result.limit_s:.0f} s")
        case OutOfMemory():
            return StepMapping(unseen=f"out of memory: {result.detail}")
        case _:
            raise AutomeshError(f"a look at arrays was answered with {type(result).__name__}")


def _splits(arrays: Collection[SplitArray]) -> set[object]:
    """Returns the splits of arrays, without the arrays' names."""
    return {array.split for array in arrays}
