"""The facts about a script that is run unmodified: its mesh and its step (no jax)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from automesh.errors import UsageError, did_you_mean
from automesh.program.infer.nouns import StepClasses
from automesh.program.infer.search.layout import Layout, Split

CarriedBy = Literal["trace", "function"]
"""The way to carry a stored step to another mesh: as the trace that was stored, or by tracing its
function anew."""
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of code; `file` is empty if there is no line to show."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMesh:
    """A mesh that the script makes.

    Attributes:
      axes: names and sizes of the axes, in order.
      axis_types: auto, explicit or manual, one per axis.
      made_at: the script's line that makes it.
    """

    axes: Sizes
    axis_types: tuple[str, ...]
    made_at: SourceLine

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return ",".join(f"{name}:{size}" for name, size in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Consecutive leaves of a step's outputs that are consecutive leaves of its arguments in the
    next call.

    Attributes:
      output, argument: position of the first leaf among all leaves of the outputs and of the
        arguments.
      count: number of leaves.
    """

    output: int
    argument: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One of several jitted functions that are one step, in the order in which they are called.

    Attributes:
      skipped: earlier calls from the same line, of other variants.
      kept: positions of the outputs that the whole step returns: those that come back in its next
        call, and those that no other part takes.
      times: how often the script calls it for each call of the last part, though the step holds it
        once, as its outputs are added up outside of jit.
    """

    name: str
    defined_at: SourceLine
    called_at: SourceLine
    skipped: int
    kept: tuple[int, ...]
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """The loop in one call of a jitted function whose body is the step.

    Attributes:
      at: the line that makes the loop.
      turns: number of its turns; 0 if only a run shows it.
    """

    at: SourceLine
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStep:
    """The jitted function through which the parameters and the optimizer state of a script flow; or
    several functions that do so together, or the body of a loop in a function.

    Attributes:
      name: name of the function; names of several parts have a `+` between them.
      defined_at: where its code begins.
      called_at: the script's line that calls it.
      argument_bytes: bytes of all arguments, unsharded.
      skipped: earlier calls from the same line, of other variants.
      carried: the outputs that come back as arguments of the next call.
      parts: the functions, if there are several; a function that is called several times is listed
        as often.
      loop: the loop, if its body is the step.
      calls: number of calls of the function until the script was stopped, in all variants.
      flops: FLOPs of one call, counted in its trace.
      doubt: why another function may be the step; empty if this one has all properties of a step.
      outside: variables of the script that change with the step and are made outside of jit.
      is_unjitted: whether the script calls it outside of any jit.
    """

    name: str
    defined_at: SourceLine
    called_at: SourceLine
    argument_bytes: int
    skipped: int = 0
    carried: tuple[Carried, ...] = ()
    parts: tuple[StepPart, ...] = ()
    loop: LoopStep | None = None
    calls: int = 0
    flops: float = 0.0
    doubt: str = ""
    outside: tuple[str, ...] = ()
    is_unjitted: bool = False

    def in_words(self) -> str:
        """Describes the step: `train_step` (train.py:12), called at train.py:30."""
        return self._told(lambda part: f"`{part.name}`{_definition(part)}{_call(part)}")

    def in_short(self) -> str:
        """Names the step by the line that calls it: `train_step` (train.py:30)."""
        return self._told(
            lambda part: (
                f"`{part.name}` ({part.called_at if part.called_at.file else part.defined_at})"
            )
        )

    def _told(self, tell: Callable[[ScriptStep | StepPart], str]) -> str:
        if self.loop is not None:
            turns = f", of {self.loop.turns:,}" if self.loop.turns else ""
            return (
                f"`{self.name}` (one turn of its loop at {self.loop.at}{turns}: the one call at "
                f"{self.called_at} is the whole training)"
            )
        if self.parts:
            times = Counter((part.name, part.called_at) for part in self.parts)
            each = {(part.name, part.called_at): part for part in self.parts}
            told = [
                tell(part) + (f" ({times[place]} times)" if times[place] > 1 else "")
                for place, part in each.items()
            ]
            return " and then ".join(told) + ", searched as one step,"
        return tell(self)

    def about_outside(self) -> str:
        """Returns which work of a training is not part of its step, or is in it less often than in
        the script, and what to do about it; empty if no such work is known."""
        if self.is_unjitted and not self.outside:
            return (
                f"the script calls `{self.name}` ({self.called_at}) outside of `jax.jit`, "
                "operation by operation: it is searched as if it were jitted; jit it to have what "
                "is found"
            )
        if not self.outside:
            return self._about_times().removeprefix("; ")
        names = [f"`{name}`" for name in self.outside]
        listed = ", ".join(names[:-1]) + (" and " if names[:-1] else "") + names[-1]
        are = "are" if len(names) > 1 else "is"
        if self.parts:
            return (
                f"{listed} {are} changed outside of jit between {self._listed_parts()}, which is "
                f"neither estimated nor timed; jit that, too{self._about_times()}"
            )
        if self.is_unjitted:
            return (
                f"the script jits no part of its step: loss and gradients (`{self.name}`, "
                f"{self.called_at}) are searched as if they were jitted, and {listed} {are} "
                "neither estimated nor timed; jit all of it to have what is found"
            )
        return (
            f"only loss and gradients are jitted (`{self.name}`): {listed} {are} made outside, "
            "operation by operation, and neither estimated nor timed; jit the update, too"
        )

    def _about_times(self) -> str:
        return "".join(
            f"; `{part.name}` is called {part.times} times for each call of "
            f"`{self.parts[-1].name}`, and is estimated and timed once"
            for part in self.parts
            if part.times > 1
        )

    def _listed_parts(self) -> str:
        return " and ".join(dict.fromkeys(f"`{part.name}`" for part in self.parts))


def _call(part: ScriptStep | StepPart) -> str:
    # A function that a thread runs is called by no line of the script.
    return f", called at {part.called_at}" if part.called_at.file else ""


def _definition(part: ScriptStep | StepPart) -> str:
    return f" ({part.defined_at})" if part.defined_at.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSplit:
    """An axis of the script's mesh that a search divides into several axes.

    Attributes:
      axis: the script's name for it.
      into: the axes that replace it. All of them split what it splits; all but the first also split
        the state that it leaves whole.
    """

    axis: str
    into: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.axis}={','.join(self.into)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The way in which a script is run up to its step, with another mesh than its own.

    Attributes:
      mesh: the script's own mesh.
      step: the step at which the script is stopped.
      splits: axes of its mesh that the search divides into several axes.
      without_arrays: whether its arrays have no data, see `capture.abstract`.
      runs_with_arrays: whether the script itself is run with its arrays all the same, as its first
        run was: it may decide by their values.
      folder: folder in which its step is stored (`program.carry`) and its starts are counted, or
        empty.
      carried_by: how workers carry the stored step to other meshes; empty if they run the script
        for each mesh.
      start_s: seconds from the script's first line to its step, in its first run.
      num_devices: how many devices the script is shown, because it names that number, or because
        its mesh of all of them does not divide its arrays; 0 for all.
      makes_auto: whether the script gets Auto axes where it leaves their types to `jax.make_mesh`,
        because it fails with those that jax makes.
      undivided: of how many devices the mesh is that it would make, and what that does not divide;
        empty if it is shown all, or names the number.
      unplaced: leaves of the step's arguments that lie on no mesh at its first call, as what
        `jnp.zeros` makes.
      layout: the layout that is searched besides meshes, where shardings are inferred; None if the
        script is searched as it is written.
    """

    mesh: ScriptMesh
    step: ScriptStep
    splits: tuple[AxisSplit, ...] = ()
    without_arrays: bool = False
    num_devices: int = 0
    makes_auto: bool = False
    layout: Layout | None = None
    # These are not part of what is searched.
    undivided: str = field(default="", compare=False)
    unplaced: tuple[int, ...] = field(default=(), compare=False)
    runs_with_arrays: bool = field(default=False, compare=False)
    folder: str = field(default="", compare=False)
    carried_by: CarriedBy | Literal[""] = field(default="", compare=False)
    start_s: float = field(default=0.0, compare=False)

    @property
    def is_carried(self) -> bool:
        """Whether workers load the step from its folder."""
        return bool(self.carried_by)

    def stored(self, by: CarriedBy | Literal[""]) -> Capture:
        """Returns how workers use stored steps: without data, until they measure.

        Args:
          by: how they carry the step of the first run to other meshes; empty if each mesh has a run
            and a stored step of its own.
        """
        had_arrays = self.runs_with_arrays or not self.without_arrays
        return replace(self, carried_by=by, without_arrays=True, runs_with_arrays=had_arrays)

    @property
    def makes_mesh(self) -> bool:
        """Whether the script makes a mesh; else its step is for one device."""
        return self.layout is None or self.layout.keeps_written

    @property
    def searched(self) -> ScriptMesh:
        """The script's own mesh with the axes of the search: the first part of a divided axis has
        the axis's whole size, so that the step does what the script does."""
        return split_mesh(self.mesh, self.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The facts that the first run of a script shows, on its own mesh.

    Attributes:
      capture: how the script is run from now on.
      batch_axes: the axes of the mesh that split the arguments which are new in every step.
      num_devices: number of devices that the script saw; its mesh may have fewer.
      classes: classes of the dimensions of its step, if it makes no mesh or they are wanted; else
        None.
      makes_mesh: whether the script makes a mesh that its step uses.
      unused_mesh: the mesh that it makes and its step does not use; None if there is none.
      written: for each leaf of the step's arguments, the axes of the script's mesh over which it
        splits each dimension; None for a leaf that is not on that mesh. Empty if not wanted.
      asked_devices: virtual CPU devices that the script asked for and got, where the target leaves
        their number open; 0 if it asked for none.
      other_steps: other functions that it calls again and again, and that are not searched.
      other_meshes: other meshes that it makes, and that stay as they are.
      notices: what was unusual about the run, a sentence each.
      took_s: seconds from the script's first line to its step.
      not_carried: why its step could not be stored; empty if it is stored.
    """

    capture: Capture
    batch_axes: tuple[str, ...]
    num_devices: int
    other_steps: tuple[ScriptStep, ...] = ()
    other_meshes: tuple[ScriptMesh, ...] = ()
    notices: tuple[str, ...] = ()
    took_s: float = field(default=0.0, compare=False)
    not_carried: str = ""
    asked_devices: int = 0
    classes: StepClasses | None = None
    makes_mesh: bool = True
    unused_mesh: ScriptMesh | None = None
    written: tuple[Split | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryCheck:
    """A comparison on one mesh of the step that was carried there with the step of a real run
    there.

    Attributes:
      mesh: the mesh on which the script was run, as text; empty if the step can be carried to no
        mesh.
      by: how the step was carried.
      difference: what the real run does differently, a sentence; empty if both are the same.
      batch: the batch of the real run, if that is all that differs, and that of the script's own
        mesh: the step can be carried with the latter. Empty if both are the same.
      took_s: seconds of the real run.
      is_stored: whether the step of this run, on a mesh that divides more, replaces the stored one,
        which differs.
    """

    mesh: str = ""
    by: CarriedBy = "trace"
    difference: str = ""
    batch: str = ""
    took_s: float = 0.0
    is_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevices:
    """The outcome that the first run of a script failed because the script names another number of
    devices, or because the mesh that it makes of all of them does not divide its arrays.

    Attributes:
      num_devices: number of devices that the script wants.
      reason: why it failed.
      undivided: what its mesh of all devices does not divide; empty if it names the number.
    """

    num_devices: int
    reason: str
    undivided: str = ""


def parse_splits(texts: Sequence[str]) -> tuple[AxisSplit, ...]:
    """Reads texts such as `data=dp,fsdp`, one per axis.

    Raises:
      UsageError: a text is not of this form, or names an axis twice.

    Example:
      >>> parse_splits(["data=dp,fsdp"])[0].into
      ('dp', 'fsdp')
    """
    found: list[AxisSplit] = []
    for text in texts:
        axis, equals, rest = (part.strip() for part in text.partition("="))
        into = tuple(name.strip() for name in rest.split(","))
        if not equals or not axis.isidentifier() or not all(name.isidentifier() for name in into):
            raise UsageError(
                f"`--split {text}` does not name an axis and the axes that replace it",
                hint="write `--split data=dp,fsdp`",
            )
        if len(into) < 2:
            raise UsageError(
                f"`--split {text}` replaces one axis by one other",
                hint=f"name two or more: `--split {axis}=dp,fsdp`",
            )
        if axis in into:
            raise UsageError(
                f"`--split {text}` keeps the name `{axis}` for one of its parts",
                hint="give all parts new names: the old one goes on meaning all of them",
            )
        found.append(AxisSplit(axis=axis, into=into))
    names = [name for split in found for name in split.into]
    axes = [split.axis for split in found]
    for name in (*names, *axes):
        if names.count(name) > 1 or axes.count(name) > 1:
            raise UsageError(f"`--split` names the axis `{name}` twice", hint="name each axis once")
    return tuple(found)


def split_mesh(mesh: ScriptMesh, splits: Sequence[AxisSplit]) -> ScriptMesh:
    """Returns a mesh of the script with the axes of the search; see `Capture.searched`."""
    axes: list[tuple[str, int]] = []
    types: list[str] = []
    into = names_in_place(splits)
    for (name, size), kind in zip(mesh.axes, mesh.axis_types, strict=True):
        first, *rest = into.get(name, (name,))
        axes += [(first, size), *((other, 1) for other in rest)]
        types += [kind] * (1 + len(rest))
    return replace(mesh, axes=tuple(axes), axis_types=tuple(types))


def names_in_place(splits: Sequence[AxisSplit]) -> Mapping[str, tuple[str, ...]]:
    """Returns, for each divided axis by the script's name, the axes that replace it."""
    return {split.axis: split.into for split in splits}


def check_splits(splits: Sequence[AxisSplit], mesh: ScriptMesh) -> None:
    """Checks that a mesh has the axes that shall be divided, and no axes with the new names.

    Raises:
      UsageError: it lacks such an axis, or has one with a new name.
    """
    for split in splits:
        if split.axis not in mesh.names:
            raise UsageError(
                f"`--split {split}`: the script's mesh {mesh} ({mesh.made_at}) has no axis "
                f"`{split.axis}`{did_you_mean(split.axis, mesh.names)}",
                hint=f"its axes are {', '.join(mesh.names)}",
            )
    kept = set(mesh.names) - {split.axis for split in splits}
    for split in splits:
        for name in split.into:
            if name in kept:
                raise UsageError(
                    f"`--split {split}`: the script's mesh {mesh} ({mesh.made_at}) has an axis "
                    f"`{name}` already",
                    hint="give the parts names of their own",
                )
