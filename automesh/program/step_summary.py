"""The summary of a step: its arguments, carried state and results (no jax)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.program.infer.nouns import StepClasses

Origin = Literal["made up", "init", "build", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array among the step's arguments.

    Attributes:
      name: its name as a Python expression: `args[0].params['w']`.
      spec: how it is split, `P('fsdp', 'tp')`; empty if unknown.
      device_bytes: bytes on one device; of the whole array if its split is unknown.
      is_donated: True if the step may reuse its memory.
      is_ref: True for a mutable array reference.
      origin: where its first values come from; empty if the step is not run.
      values: words for made-up values, `positive floats`; empty if they are not made up.
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
    """An argument that is carried to the next step. An output replaces it; `output` is empty if the
    step changes it in place. `arrays` is the number of its arrays."""

    argument: str
    output: str
    arrays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The summary of a step that `build` made on one mesh.

    Attributes:
      arguments: all arrays, in the order of the step's arguments.
      static: (name, value) of the arguments that are no arrays.
      carried: the arguments that the default `advance` replaces; empty if the workload has its own.
      lost: names of arrays that are donated and that nothing replaces.
      losses: names of the scalar floats that the step returns.
      has_init, has_advance: whether the workload has these functions.
      is_pipeline: True if the step is `pipeline.train_step`'s.
      change: how the arguments of a second call of `build` differ; empty if they do not.
      fingerprint: fingerprint of the program.
      classes: classes of its dimensions; None for a pipeline.
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
