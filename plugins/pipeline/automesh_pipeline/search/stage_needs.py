"""Computes the memory and traffic of a pipeline's stages from the compiler and the schedule (jax).

Arguments that persist are counted once for a stage, whichever programs read them; the compiled
program shows the rest of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from automesh.cost.pipeline.outcome import UPDATE
from automesh.cost.pipeline.step import STAYS, PipelineWork, StageMemory, price_pipeline
from automesh.outcomes import PipelineOutcome, StageOutcome, StageProgram
from automesh.pipeline import Schedule

Programs = Mapping[tuple[int, str], StageProgram]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resident:
    """Bytes on one device of a stage that are allocated whichever program runs."""

    params: int
    sums: int
    owned: int
    optimizer: int
    inputs: int
    saved: int


def device_bytes(leaves: Iterable[Any]) -> int:
    """Returns the bytes of arrays with shardings on the device that holds most of each."""
    total = 0
    for leaf in leaves:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def describe_pipeline(trained: Any, programs: Programs, *, axis: str) -> PipelineOutcome:
    """Describes the stages of a compiled pipeline.

    Args:
      trained: the result of `LoweredPipeline.compile`.
      programs: the programs of each stage and action, and of each stage's update.
      axis: the mesh axis along which the pipeline runs.
    """
    schedule: Schedule = trained.schedule
    resident = [_resident(trained, stage) for stage in range(schedule.num_stages)]
    memory = [_memory(one, stage, programs) for stage, one in enumerate(resident)]
    idle = [STAYS] * schedule.num_stages
    work = PipelineWork(programs={}, to_next=idle, to_previous=idle, memory=memory)
    peaks = price_pipeline(schedule, work).stage_bytes
    sent = _sent(trained.pipeline.transfers, schedule.num_stages)
    return PipelineOutcome(
        axis=axis,
        schedule=schedule.name,
        actions=tuple(str(schedule).splitlines()),
        stages=tuple(
            StageOutcome(
                rank=schedule.homes[stage],
                lasting_bytes=one.lasting,
                activation_bytes=one.activation,
                working_bytes=one.working,
                finishing_bytes=one.finishing,
                next_bytes=sent[stage][0],
                previous_bytes=sent[stage][1],
                peak_bytes=peaks[stage],
            )
            for stage, one in enumerate(memory)
        ),
        programs=tuple(programs[key] for key in sorted(programs)),
    )


def _resident(trained: Any, stage: int) -> _Resident:
    stages = trained.pipeline.stages
    shapes = stages.shapes[stage]
    return _Resident(
        params=device_bytes(shapes.params),
        sums=device_bytes(shapes.sums),
        owned=device_bytes(shapes.owned(shapes.params)),
        optimizer=device_bytes(jax.tree.leaves(trained.state.optimizer[stage])),
        inputs=device_bytes((*shapes.batch, *shapes.inputs)),
        saved=device_bytes(shapes.saved),
    )


def _memory(one: _Resident, stage: int, programs: Programs) -> StageMemory:
    known = {
        "F": one.params + one.inputs + one.saved,
        "I": one.params + one.inputs + one.saved,
        "B": one.params + one.inputs + one.saved + one.sums,
        "W": one.params + one.inputs + one.saved + one.sums,
        # The gradients overwrite the sums.
        UPDATE: one.owned + one.optimizer + one.sums,
    }
    beside = {
        action: max(programs[stage, action].memory.peak_bytes - bytes_, 0)
        for action, bytes_ in known.items()
        if (stage, action) in programs
    }
    finishing = beside.pop(UPDATE, 0)
    return StageMemory(
        lasting=one.params + one.sums + one.optimizer,
        activation=one.inputs + one.saved,
        working=max(beside.values(), default=0),
        finishing=finishing,
    )


def _sent(transfers: Sequence[Any], num_stages: int) -> list[tuple[int, int]]:
    """Returns, for each stage, the bytes that one of its devices sends forward and back for one
    microbatch."""
    sent = [(0, 0)] * num_stages
    for transfer in transfers:
        on, back = sent[transfer.from_stage]
        if transfer.kind == "F":
            sent[transfer.from_stage] = (on + transfer.nbytes_per_device, back)
        else:
            sent[transfer.from_stage] = (on, back + transfer.nbytes_per_device)
    return sent
