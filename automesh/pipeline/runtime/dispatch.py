"""Dispatches the steps of a pipeline from one controller (jax).

Calls return before the devices are done: what one rank waits for does not keep others from working.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from automesh.pipeline.runtime.dispatch_plan import Drop, Load, Run, Send, Slot, Step
from automesh.pipeline.runtime.split.arguments import Struct
from automesh.pipeline.runtime.stages.compile import CompiledStages
from automesh.pipeline.runtime.stages.transfer import on_host

# Called after each step with it and with every array that is held, by slot.
Watch = Callable[[Step, dict[Slot, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a step of a pipeline has made.

    Attributes:
      losses: of each microbatch.
      sums: of each stage the sums of the gradients of its parameters over the microbatches.
    """

    losses: tuple[Any, ...]
    sums: tuple[tuple[Any, ...], ...]


class Runner:
    """Runs one plan of steps.

    Args:
      stages: compiled for everything that the plan runs.
      num_microbatches: as many as the plan has.
      dim: the dimension of the batch's arrays that is cut.
    """

    def __init__(
        self, stages: CompiledStages, steps: Sequence[Step], *, num_microbatches: int, dim: int
    ) -> None:
        self._stages = stages
        self._steps = tuple(steps)
        self._num_microbatches = num_microbatches
        self._dim = dim

    def run(
        self,
        params: Sequence[tuple[Any, ...]],
        batch: Sequence[Any],
        watch: Watch | None = None,
    ) -> Ran:
        """One step.

        Args:
          params: of each stage the arrays that it reads, where its programs take them.
          batch: the leaves of the whole batch, anywhere.
          watch: called after each step.
        """
        transfers = self._stages.transfers
        cut = [self._cut(on_host(leaf) if transfers.spans else leaf) for leaf in batch]
        sums = [self._zeros(stage) for stage in range(len(self._stages.functions))]
        held: dict[Slot, Any] = {}
        here = frozenset(self._stages.here)
        for step in self._steps:
            match step:
                case Load():
                    slot = step.slot
                    part = cut[slot.number](slot.microbatch)
                    held[slot] = transfers.load(part, self._stages.places[slot.place])
                case Send():
                    sharding = self._stages.places[step.target.place]
                    held[step.target] = transfers.move(held[step.source], sharding)
                case Drop():
                    for slot in step.slots:
                        del held[slot]
                case Run() if step.action.stage in here:
                    self._run(step, params[step.action.stage], sums, held)
                case Run():
                    self._placeholder(step, held)
            if watch is not None:
                watch(step, held)
        losses = [(slot.microbatch, loss) for slot, loss in held.items() if slot.kind == "loss"]
        return Ran(
            losses=tuple(loss for _, loss in sorted(losses, key=lambda one: one[0])),
            sums=tuple(sums),
        )

    def _run(
        self,
        step: Run,
        params: tuple[Any, ...],
        sums: list[tuple[Any, ...]],
        held: dict[Slot, Any],
    ) -> None:
        kind, stage = step.action.kind, step.action.stage
        losses: tuple[Any, ...] = ()
        batch = tuple(held[slot] for slot in step.batch)
        inputs = tuple(held[slot] for slot in step.inputs)
        if kind == "F":
            written, saved = self._stages.forward[stage](params, batch, inputs)
            if step.saved is not None:
                held[step.saved] = saved
            if step.loss is not None:
                losses = written
        else:
            saved = () if step.saved is None else held[step.saved]
            gradients = tuple(tuple(held[slot] for slot in slots) for slots in step.gradients)
            totals = () if kind == "I" else sums[stage]
            program = self._stages.backward(stage, kind)
            added, written, losses = program(params, batch, inputs, saved, gradients, totals)
            if kind != "I":
                sums[stage] = added
        if step.writes:
            held.update(zip(step.writes, written, strict=True))
        if step.loss is not None:
            held[step.loss] = losses[0]

    def _placeholder(self, step: Run, held: dict[Slot, Any]) -> None:
        """What another process runs: its results, of which only their places are known here."""
        stages = self._stages
        for slot in step.writes:
            like = stages.split.values[slot.number].like
            sharding = stages.places[slot.place]
            held[slot] = stages.transfers.placeholder(
                Struct(like.shape, like.dtype, sharding=sharding)
            )
        held.update((slot, None) for slot in step.makes if slot not in held)

    def _zeros(self, stage: int) -> tuple[Any, ...]:
        stages = self._stages
        if stage in stages.zeros:
            return stages.zeros[stage]()
        return stages.transfers.placeholders(stages.shapes[stage].sums)

    def _cut(self, leaf: Any) -> Callable[[int], Any]:
        """What gives the part of a leaf of the batch that is a microbatch's."""
        if not jnp.ndim(leaf):
            return lambda _: leaf
        rows = leaf.shape[self._dim] // self._num_microbatches
        if isinstance(leaf, jax.Array):
            parts = _cut_array(leaf, self._num_microbatches, self._dim)
            return lambda microbatch: parts[microbatch]
        before = (slice(None),) * self._dim
        return lambda microbatch: leaf[(*before, slice(microbatch * rows, (microbatch + 1) * rows))]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut_array(array: jax.Array, parts: int, dim: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.split(array, parts, axis=dim))
