"""A compiled pipeline: the programs of the stages of a loss, the transfers between them, and how
they are run (jax).

One controller dispatches all steps. A call returns before the devices are done, so a rank that
waits does not block the others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from automesh.errors import UsageError
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.schedule import Schedule
from automesh_pipeline.runtime.dispatch_plan import Drop, Load, Run, Send, Slot, Step, plan_steps
from automesh_pipeline.runtime.split.arguments import Struct, bytes_per_device, is_same_layout
from automesh_pipeline.runtime.split.parts import Parts
from automesh_pipeline.runtime.stages.compile import CompiledStages, ProgramCompiler, lower_forward
from automesh_pipeline.runtime.stages.transfer import on_host
from automesh_pipeline.runtime.stages.updates import Finisher

# Called after each step, with the step and with all arrays that are held, by slot.
Watch = Callable[[Step, dict[Slot, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStep:
    """The results of one step of a pipeline.

    Attributes:
      losses: the loss of each microbatch.
      sums: for each stage, the gradients of its parameters, summed over the microbatches.
    """

    losses: tuple[Any, ...]
    sums: tuple[tuple[Any, ...], ...]


class Runner:
    """Runs one plan of steps.

    Args:
      stages: the stages, with all programs that the plan runs.
      num_microbatches: the number of microbatches in the plan.
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
    ) -> RanStep:
        """Runs one step.

        Args:
          params: for each stage, the parameters that it reads, with the shardings that its programs
            expect.
          batch: the leaves of the whole batch, on any device.
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
        return RanStep(
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
        """Adds placeholders for the results of a program that another process runs: only their
        shapes and shardings are known here."""
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
        """Returns a function that cuts the part of one microbatch from a leaf of the batch."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """An array that goes from one stage's submesh to another's, once for each microbatch.

    Attributes:
      kind: the action that makes it: `F` for a value, `B` or `I` for its gradient.
      value: the number of the value.
      source, target: the shapes and shardings of the array as it is made and as it arrives.
    """

    from_stage: int
    to_stage: int
    kind: Literal["F", "B", "I"]
    value: int
    source: Struct
    target: Struct

    @property
    def nbytes_per_device(self) -> int:
        """The bytes that a device sends or receives, whichever is more."""
        return max(bytes_per_device(self.source), bytes_per_device(self.target))

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.source.size * self.source.dtype.itemsize

    @property
    def same_layout(self) -> bool:
        """Whether each device of the target gets exactly what the device with the same number in
        the source has."""
        some, other = (cast("Sharding", one.sharding) for one in (self.source, self.target))
        return is_same_layout(some, other, self.source.shape)


def find_transfers(stages: CompiledStages, homes: Sequence[int]) -> tuple[StageTransfer, ...]:
    """Finds the arrays that the ranks of a pipeline send each other for one microbatch.

    If several stages on one rank read an array in the same layout, it is sent to the first of them.

    Args:
      homes: the rank of each stage.
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


class CompiledPipeline:
    """A loss compiled as a pipeline, for arrays of given shapes; `microbatch` makes it.

    Attributes:
      parts: the loss as stages, from which it was compiled.
      schedule: the order of the work.
      steps: the steps that are dispatched, in this order.
      stages: the stages: their programs, and the shapes of their arguments and results.
      shardings: a tree like the parameters, with the sharding in which each is kept.

    Args:
      forward: the lowered forward passes, if they exist already.
      compiler: how the programs are compiled; default: so that they can be run.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        forward: Sequence[jax.stages.Lowered] | None = None,
        compiler: ProgramCompiler | None = None,
    ) -> None:
        self.parts = parts
        self._options = parts.options
        self.schedule = parts.schedule
        lowered = lower_forward(parts) if forward is None else forward
        self.stages = CompiledStages(parts, lowered, compiler or ProgramCompiler())
        self.steps: tuple[Step, ...] = ()
        self._plan()
        self.finisher = Finisher(self.stages)
        self.shardings = jax.tree.unflatten(parts.structures[0], self._owner_shardings())

    def with_schedule(self, schedule: Schedule) -> CompiledPipeline:
        """Returns the same stages with another schedule; only missing programs are compiled.

        Raises:
          UsageError: the schedule is for other numbers of stages, ranks or microbatches, or has
            stages on other ranks.

        Example:
          >>> import jax.numpy as jnp
          >>> from automesh import create_mesh, pipeline
          >>> layer = lambda w, x: jnp.tanh(x @ w)
          >>> loss = pipeline.chain([layer, layer], lambda y, batch: jnp.mean(y**2))
          >>> mesh = create_mesh((2, 4), ("pp", "dp"))
          >>> step = pipeline.microbatch(loss, mesh=mesh, schedule="gpipe", num_microbatches=4)
          >>> params, batch = (jnp.eye(4), jnp.eye(4)), jnp.ones((8, 4))
          >>> other = pipeline.make_schedule("zb_h1", num_ranks=2, num_microbatches=4)
          >>> value, _ = step.compile(params, batch).with_schedule(other)(params, batch)
          >>> round(value.item(), 3)
          0.412
        """
        count = len(self.stages.functions)
        changed = copy.copy(self)
        changed.schedule = self._options.check_schedule(schedule, count)
        changed.parts = replace(self.parts, schedule=schedule)
        if schedule.homes != self.schedule.homes:
            raise UsageError(
                f"the schedule `{schedule.name}` has the stages on the ranks {schedule.homes}, and "
                f"they are compiled for {self.schedule.homes}"
            )
        changed._plan()
        return changed

    def place(self, params: Any, *, copy: bool = False) -> Any:
        """Puts each parameter on the stage that owns it.

        Args:
          copy: whether arrays that are already there are copied as well.

        Raises:
          UsageError: the tree is not the one that the pipeline was compiled for; or an array is on
            several devices that are not those of its stage.
        """
        leaves = self.parts.leaves(params, 0)
        placed = [
            self._placed(leaf, sharding, name, copy=copy)
            for leaf, sharding, name in zip(
                leaves, self._owner_shardings(), self.parts.params.names, strict=True
            )
        ]
        return jax.tree.unflatten(self.structure, placed)

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """Computes the value and the gradients.

        Args:
          params: the parameters as `place` returns them; arrays on a single device are moved.
          batch: a tree of arrays, on any devices.

        Returns:
          The loss, on the last stage; and a tree like `params`, in which each gradient has the
          devices of its parameter.

        Raises:
          UsageError: see `place`.
        """
        ran = self.run(jax.tree.leaves(self.place(params)), batch)
        finished = self.finisher.finish(ran.sums)
        value = self.add_losses(ran)
        return value, jax.tree.unflatten(self.structure, finished.gradients)

    def run(self, params: Sequence[Any], batch: Any, watch: Watch | None = None) -> RanStep:
        """Computes the losses of the microbatches and the sums of the gradients, without adding
        them up.

        Args:
          params: the leaves, as `place` returns them.
          watch: called after each dispatched step, with the step and with the arrays that are held.

        Raises:
          UsageError: the batch is not like the one that the pipeline was compiled for.
        """
        stages = self.stages
        owners = stages.split.owners

        def put(leaf: int, stage: int, sharding: Any) -> Any:
            # A parameter that several stages read is sent, once for each step, to those that do not
            # own it.
            array = params[leaf]
            if owners[leaf] == stage:
                return array
            return stages.transfers.move(array, sharding, is_overwritten=True)

        spread = [
            tuple(
                put(leaf, stage, like.sharding)
                for leaf, like in zip(part.params, stages.shapes[stage].params, strict=True)
            )
            for stage, part in enumerate(stages.split.stages)
        ]
        return self._runner.run(spread, self.parts.leaves(batch, 1), watch)

    def add_losses(self, ran: RanStep) -> Any:
        """Returns the loss of a whole batch, on the last stage; with several processes on all
        devices."""
        return self.finisher.add_losses(ran.losses)

    @property
    def programs(self) -> Mapping[tuple[int, ActionKind], Any]:
        """The compiled program (a `jax.stages.Compiled`) of each stage and kind of action."""
        return self.stages.programs

    @property
    def meshes(self) -> tuple[jax.sharding.Mesh, ...]:
        """The submesh of each stage."""
        return self.stages.meshes

    @property
    def structure(self) -> Any:
        """The structure of the tree of parameters."""
        return self.parts.structures[0]

    @property
    def transfers(self) -> tuple[StageTransfer, ...]:
        """The arrays that stages send each other for one microbatch."""
        return find_transfers(self.stages, self.schedule.homes)

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes on one device that one microbatch keeps for its backward pass, for each stage."""
        return tuple(
            sum(map(bytes_per_device, (*shapes.inputs, *shapes.saved)))
            for shapes in self.stages.shapes
        )

    def _plan(self) -> None:
        self.steps = plan_steps(self.schedule, self.stages.slots)
        self.stages.prepare(
            (step.action.stage, step.action.kind)
            for step in self.steps
            if isinstance(step, Run) and step.action.kind != "F"
        )
        self._runner = Runner(
            self.stages,
            self.steps,
            num_microbatches=self._options.num_microbatches,
            dim=self._options.dim,
        )

    def _owner_shardings(self) -> list[Any]:
        owned = [shape.owned(shape.params) for shape in self.stages.shapes]
        return [like.sharding for like in self.parts.in_order(owned)]

    def _placed(self, leaf: Any, sharding: Any, name: str, *, copy: bool) -> Any:
        current, transfers = getattr(leaf, "sharding", None), self.stages.transfers
        if isinstance(current, NamedSharding) and current.device_set != sharding.device_set:
            there = sorted(device.id for device in current.device_set)
            wanted = sorted(device.id for device in sharding.device_set)
            raise UsageError(
                f"{name} is on the devices {there}, and its stage is on {wanted}",
                hint="give the parameters as arrays of the host, or where an earlier step of the "
                "same pipeline has left them",
            )
        placed = leaf if current == sharding else transfers.load(leaf, sharding)
        # `device_put` to several devices may share the memory of the source, whatever `may_alias`
        # says. An array of another process cannot be shared.
        is_shared = isinstance(leaf, jax.Array) and transfers.is_here(sharding.mesh)
        return jnp.copy(placed) if copy and is_shared else placed
