"""A rule in the terms that frameworks need (`Setting`), and what a framework supports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from automesh.errors import UsageError
from automesh.limits import LARGEST_INTEGER
from automesh.mesh.axes import Scalar
from automesh.mesh.evidence import NO_EVIDENCE, Evidence

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSize:
    """One axis of a mesh in a framework's words.

    Attributes:
      ici: devices along it inside one granule (slice or node); -1: what is left of them.
      dcn: granules along it; -1: what is left of them.
    """

    name: str
    ici: int = 1
    dcn: int = 1

    @property
    def is_used(self) -> bool:
        return (self.ici, self.dcn) != (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A mesh and what goes with it, in the words of one framework.

    Attributes:
      match: regular expression for the whole name of a target; empty where a file names none.
      axes: all axes that are written, in the framework's order.
      flat: the sizes are those of the whole mesh, and the framework finds out what of it lies
        between granules; every `dcn` is then 1.
      batch_axes: those that split the rows of a batch; None: it is not known.
      remat: the framework's own name of what is recomputed; None: nothing is said.
      accumulation: microbatches whose gradients are summed before an update; 0: nothing is said.
      global_batch: rows of one update of the optimizer, over all devices; 0: nothing is said.
      per_device_batch: rows of one device in one microbatch, where a file says it and the number of
        devices is open; 0: nothing is said.
      extra: more keys of the framework with their values.
      compiler_options: of the rule.
      explicit: every axis of the mesh is of the type Explicit.
      notes: what else a file says, and what was not taken over; one phrase each.
    """

    match: str = ""
    axes: tuple[AxisSize, ...]
    flat: bool = False
    batch_axes: tuple[str, ...] | None = None
    remat: str | None = None
    accumulation: int = 0
    global_batch: int = 0
    per_device_batch: float = 0.0
    extra: tuple[tuple[str, Scalar], ...] = ()
    compiler_options: tuple[tuple[str, Scalar], ...] = ()
    explicit: bool = False
    evidence: Evidence = NO_EVIDENCE
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A rules file holds whole numbers of 64 bits.
        rows = max(self.global_batch, self.accumulation)
        if rows > LARGEST_INTEGER or self.per_device_batch > LARGEST_INTEGER / max(
            self.num_devices, 1
        ):
            raise UsageError(
                f"its batch has more than {LARGEST_INTEGER} rows",
                hint="write the rows that a device, or all of them, really take",
            )

    @property
    def num_devices(self) -> int:
        """The devices of the whole mesh; 0 while a size is open."""
        sizes = [size for axis in self.axes for size in (axis.ici, axis.dcn)]
        return 0 if -1 in sizes else math.prod(sizes)

    @property
    def used(self) -> tuple[AxisSize, ...]:
        """The axes with a size other than 1."""
        return tuple(axis for axis in self.axes if axis.is_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWords:
    """The user's choices for turning the words of a rule into those of a framework.

    Attributes:
      axes: automesh's axis -> the framework's, for axes that are called otherwise.
      remat: a value of the knob `remat` -> another one, or the framework's own name.
      knobs: a knob -> the framework's key that takes its value.
      leave_out: knobs, or `mapping` and `compiler_options`, that are left to the user.
      global_batch: rows of one update, for a rule that does not state them; 0 if the user does not
        state them either.
    """

    axes: Mapping[str, str] = field(default_factory=dict[str, str])
    remat: Mapping[str, str] = field(default_factory=dict[str, str])
    knobs: Mapping[str, str] = field(default_factory=dict[str, str])
    leave_out: tuple[str, ...] = ()
    global_batch: int = 0


NO_WORDS = ExportWords()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """The names that a framework has for a mesh, and how these are written and read.

    Attributes:
      name: as it is named on the command line.
      title: as people write it.
      seen_in: the version whose words these are.
      axes: its own axes, in the order of its mesh.
      names: automesh's axes -> its own; the first that leads to an axis is what the axis is called
        when it is read.
      other_axes: its mesh may have axes of other names, too.
      batch_axes: of its own axes, those that split the rows of a batch, where a file does not say.
      remat: values of the knob `remat` -> its own; the first that leads to one is what it is called
        when it is read.
      remat_knob: what its own step calls the knob `remat`; empty if none of its steps is searched.
      as_configured: value of that knob that keeps the framework's configuration; it is not written.
      own_knobs: other knobs of its own step, which are its keys.
      explicit: its mesh may be one of Explicit axes.
      mesh_only: it takes a mesh, and knows nothing of the step: knobs stay with the script.
      many: a text holds the rules for several targets.
      write: the text of one setting, or of several where `many`.
      read: the settings that a text holds.
    """

    name: str
    title: str
    seen_in: str
    axes: tuple[str, ...]
    names: Pairs
    other_axes: bool = False
    batch_axes: tuple[str, ...] = ()
    remat: Pairs = ()
    remat_knob: str = ""
    as_configured: str = ""
    own_knobs: tuple[str, ...] = ()
    explicit: bool = False
    mesh_only: bool = False
    many: bool = False
    write: Callable[[tuple[Setting, ...]], str]
    read: Callable[[str], tuple[Setting, ...]]


def microbatch_rows(setting: Setting, title: str) -> int:
    """Returns the rows of one microbatch, for a framework that multiplies them by the accumulation.

    Raises:
      UsageError: the batch cannot be split so.
    """
    steps = setting.accumulation or 1
    rows, rest = divmod(setting.global_batch, steps)
    if rest:
        raise refuse(
            title,
            f"a batch of {setting.global_batch} rows is not a multiple of {steps} microbatches",
            hint="give another --batch",
        )
    return rows


def multiplied_batch(title: str, steps: int) -> UsageError:
    """Makes the error for a rule that lacks the batch of a framework that multiplies it."""
    return refuse(
        title,
        f"its {steps} microbatches multiply the batch there, and the rule does not say the batch",
        hint="give the rows of one update with --batch",
    )


def refuse(title: str, reason: str, *, hint: str) -> UsageError:
    """Makes the error for a rule that a framework cannot express."""
    return UsageError(f"{title} cannot say this rule: {reason}", hint=hint)
