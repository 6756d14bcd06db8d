"""The list of what one controller dispatches for a step of a pipeline, planned once. No jax.

Every array that lives during a part of a step has a slot. A value that other stages read is sent
once to each place that needs it, right after it was made. A slot is dropped after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from automesh.pipeline.actions import Action
from automesh.pipeline.schedule import Schedule

SlotKind = Literal["batch", "value", "gradient", "saved", "loss"]


class Slot(NamedTuple):
    """An array of one microbatch at one place.

    Attributes:
      number: the number of the leaf of the batch, of the value, or of the stage.
      reader: for a gradient, the stage that it comes from; else 0.
      place: see `PipelineSlots`.
    """

    kind: SlotKind
    number: int
    microbatch: int
    place: int
    reader: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlots:
    """The arrays that a stage reads and makes, and their places.

    Attributes:
      batch: leaf -> place.
      inputs, outputs: value -> place.
      with_gradient: the inputs that have a gradient.
      has_weights: whether the stage has parameters.
      is_last: whether it makes the loss.
      skips_forward: whether its forward pass is part of its backward pass.
      saves: whether its forward pass saves residuals.
    """

    batch: Mapping[int, int]
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    with_gradient: frozenset[int]
    has_weights: bool
    is_last: bool
    skips_forward: bool
    saves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSlots:
    """All stages. A place is the number of a sharding; equal shardings have the same number."""

    stages: tuple[StageSlots, ...]

    def readers(self, value: int) -> tuple[int, ...]:
        """Returns the stages that read a value."""
        return tuple(stage for stage, one in enumerate(self.stages) if value in one.inputs)

    def maker(self, value: int) -> StageSlots:
        """Returns the stage that makes a value."""
        return next(stage for stage in self.stages if value in stage.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Puts a part of the batch on the place that reads it."""

    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Copies an array to another place."""

    source: Slot
    target: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Runs a program of a stage.

    Attributes:
      gradients: for each output with a gradient, the slots to sum.
      saved: the slot of the values that the forward pass saves.
      writes: the outputs of `F`; for other actions the gradients of the inputs.
      loss: the slot of the loss, if the action makes it.
    """

    rank: int
    action: Action
    batch: tuple[Slot, ...]
    inputs: tuple[Slot, ...]
    gradients: tuple[tuple[Slot, ...], ...] = ()
    saved: Slot | None = None
    writes: tuple[Slot, ...] = ()
    loss: Slot | None = None

    @property
    def reads(self) -> tuple[Slot, ...]:
        saved = () if self.saved is None or self.action.kind == "F" else (self.saved,)
        flat = tuple(slot for slots in self.gradients for slot in slots)
        return (*self.batch, *self.inputs, *flat, *saved)

    @property
    def makes(self) -> tuple[Slot, ...]:
        saved = (self.saved,) if self.saved is not None and self.action.kind == "F" else ()
        return (*self.writes, *saved, *((self.loss,) if self.loss is not None else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Drops arrays that nothing reads any more."""

    slots: tuple[Slot, ...]


Step = Load | Send | Run | Drop


def plan_steps(schedule: Schedule, slots: PipelineSlots) -> tuple[Step, ...]:
    """Plans a step of a pipeline.

    Args:
      schedule: a schedule with as many stages as `slots`.

    Returns:
      The steps, each of which comes after those whose results it reads. Losses are not dropped.
    """
    planner = _Planner(slots)
    for rank, action in schedule.order:
        planner.add(rank, action)
    return tuple(_with_drops(planner.steps))


class _Planner:
    def __init__(self, slots: PipelineSlots) -> None:
        self._slots = slots
        self._made: set[Slot] = set()
        self.steps: list[Step] = []

    def add(self, rank: int, action: Action) -> None:
        stage = self._slots.stages[action.stage]

        def slots(kind: SlotKind, places: Mapping[int, int], reader: int = 0) -> tuple[Slot, ...]:
            return tuple(
                Slot(kind, number, action.microbatch, place, reader)
                for number, place in places.items()
            )

        run = Run(
            rank=rank,
            action=action,
            batch=slots("batch", stage.batch),
            inputs=slots("value", stage.inputs),
            saved=Slot("saved", action.stage, action.microbatch, 0) if stage.saves else None,
        )
        loss = Slot("loss", action.stage, action.microbatch, 0)
        if action.kind == "F":
            writes = slots("value", stage.outputs)
            self._add_forward(
                replace(run, writes=writes, loss=loss if stage.is_last else None), stage
            )
            return
        if action.kind == "W":
            self._add_backward(run, stage)
            return
        wanted = {value: at for value, at in stage.inputs.items() if value in stage.with_gradient}
        writes = slots("gradient", wanted, action.stage)
        run = replace(run, writes=writes, loss=loss if stage.skips_forward else None)
        self._add_backward(run, stage)

    def _add_forward(self, run: Run, stage: StageSlots) -> None:
        for slot in run.batch:
            if slot not in self._made:
                self._made.add(slot)
                self.steps.append(Load(slot=slot))
        if stage.skips_forward:
            return
        self.steps.append(run)
        self._made.update(run.writes)
        for source in run.writes:
            for reader in self._slots.readers(source.number):
                place = self._slots.stages[reader].inputs[source.number]
                self._send(source, source._replace(place=place))

    def _add_backward(self, run: Run, stage: StageSlots) -> None:
        does_weights = run.action.kind != "I" and stage.has_weights
        if not (does_weights or run.writes or run.loss):
            return
        gradients = tuple(
            tuple(
                Slot("gradient", value, run.action.microbatch, place, reader)
                for reader in self._slots.readers(value)
            )
            for value, place in stage.outputs.items()
            if value in self._slots.stages[self._slots.readers(value)[0]].with_gradient
        )
        self.steps.append(replace(run, gradients=gradients))
        for source in run.writes:
            place = self._slots.maker(source.number).outputs[source.number]
            self._send(source, source._replace(place=place))

    def _send(self, source: Slot, target: Slot) -> None:
        if target != source and target not in self._made:
            self._made.add(target)
            self.steps.append(Send(source=source, target=target))


def _with_drops(steps: Sequence[Step]) -> Iterable[Step]:
    """Yields the steps, and after the last use of each slot a step that drops it."""
    last_use: dict[Slot, int] = {}
    for index, step in enumerate(steps):
        last_use.update(dict.fromkeys(_touched(step), index))
    for index, step in enumerate(steps):
        yield step
        over = tuple(
            slot
            for slot in dict.fromkeys(_touched(step))
            if last_use[slot] == index and slot.kind != "loss"
        )
        if over:
            yield Drop(slots=over)


def _touched(step: Step) -> tuple[Slot, ...]:
    match step:
        case Load():
            return (step.slot,)
        case Send():
            return (step.source, step.target)
        case Run():
            return (*step.reads, *step.makes)
        case Drop():
            return ()
