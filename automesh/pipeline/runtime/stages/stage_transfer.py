"""The noun `StageTransfer`: what one stage sends to another for one microbatch (jax)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from jax.sharding import Sharding

from automesh.pipeline.runtime.split.arguments import Struct, bytes_per_device, is_same_layout
from automesh.pipeline.runtime.stages.compile import CompiledStages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """An array that goes from one stage's submesh to another's, once for each microbatch.

    Attributes:
      kind: the action that makes it: `F` for a value, `B` or `I` for its gradient.
      value: its number.
      source, target: the array as it is made and as it arrives.
    """

    from_stage: int
    to_stage: int
    kind: Literal["F", "B", "I"]
    value: int
    source: Struct
    target: Struct

    @property
    def nbytes_per_device(self) -> int:
        """What a device sends or gets, whichever is more."""
        return max(bytes_per_device(self.source), bytes_per_device(self.target))

    @property
    def global_bytes(self) -> int:
        """Of the whole array."""
        return self.source.size * self.source.dtype.itemsize

    @property
    def same_layout(self) -> bool:
        """Whether device i of the target gets what device i of the source has."""
        some, other = (cast("Sharding", one.sharding) for one in (self.source, self.target))
        return is_same_layout(some, other, self.source.shape)


def find_transfers(stages: CompiledStages, homes: Sequence[int]) -> tuple[StageTransfer, ...]:
    """What the ranks of a pipeline send each other for one microbatch.

    What several stages on one rank read in one layout is sent to the first of them.

    Args:
      homes: of each stage its rank.
    """
    return tuple(
        one
        for stage in range(len(homes))
        for one in (*_on(stages, homes, stage), *_back(stages, homes, stage))
    )


def _on(stages: CompiledStages, homes: Sequence[int], stage: int) -> Iterator[StageTransfer]:
    slots = stages.slots
    for value, place in slots.stages[stage].outputs.items():
        sent: set[tuple[int, int]] = set()
        for reader in slots.readers(value):
            target = slots.stages[reader].inputs[value]
            if homes[reader] != homes[stage] and (homes[reader], target) not in sent:
                sent.add((homes[reader], target))
                source, arrived = _structs(stages, value, place, target)
                yield StageTransfer(
                    from_stage=stage,
                    to_stage=reader,
                    kind="F",
                    value=value,
                    source=source,
                    target=arrived,
                )


def _back(stages: CompiledStages, homes: Sequence[int], stage: int) -> Iterator[StageTransfer]:
    slots = stages.slots
    own = slots.stages[stage]
    for value in sorted(own.with_gradient):
        place, target = own.inputs[value], slots.maker(value).outputs[value]
        maker = stages.split.values[value].producer
        if homes[maker] != homes[stage]:
            source, arrived = _structs(stages, value, place, target)
            yield StageTransfer(
                from_stage=stage,
                to_stage=maker,
                kind="I" if (stage, "I") in stages.programs else "B",
                value=value,
                source=source,
                target=arrived,
            )


def _structs(stages: CompiledStages, value: int, place: int, target: int) -> tuple[Struct, Struct]:
    like = stages.split.values[value].like
    return (
        Struct(like.shape, like.dtype, sharding=stages.places[place]),
        Struct(like.shape, like.dtype, sharding=stages.places[target]),
    )
