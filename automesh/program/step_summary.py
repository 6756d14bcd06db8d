"""What a step takes, what becomes of it and what it gives, in words and numbers (no jax)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.program.infer.nouns import StepClasses

Origin = Literal["made up", "init", "build", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array that the step takes.

    Attributes:
      name: as one writes it, `args[0].params['w']`.
      spec: how it is split, `P('fsdp', 'tp')`; empty if nothing says so.
      device_bytes: on one device; all of it if nothing says how it is split.
      is_donated: True if the step may reuse its memory.
      is_ref: True for a mutable array reference.
      origin: where its first values come from; empty where nothing is run.
      values: what is made up, `positive floats`; empty if it is not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    total_bytes: int
    device_bytes: int
    is_donated: bool
    is_ref: bool
    origin: Origin
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedArgument:
    """An argument of so many arrays that an output replaces in the next step, or that the step
    changes in place: then `output` is empty."""

    argument: str
    output: str
    arrays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """A step on one mesh, by what `build` gave.

    Attributes:
      arguments: all arrays, in the order of the step's arguments.
      static: (name, value) of the arguments that are no arrays.
      carried: what the next step takes from the outputs by itself; empty if `advance` says it.
      lost: names of arrays that are donated and that nothing replaces.
      losses: names of the scalar floats that the step returns.
      has_init, has_advance: whether the workload has these functions.
      is_pipeline: True if the step is `pipeline.train_step`'s.
      change: how the arguments differ that a second call of `build` gives; empty if they do not.
      fingerprint: of the program.
      classes: of its dimensions; None of a pipeline.
    """

    arguments: tuple[Argument, ...]
    static: tuple[tuple[str, str], ...]
    carried: tuple[CarriedArgument, ...]
    lost: tuple[str, ...]
    losses: tuple[str, ...]
    has_init: bool
    has_advance: bool
    is_pipeline: bool
    change: str
    fingerprint: str
    classes: StepClasses | None = None
