"""Lowering a step at small sizes, to see which axes it uses and whether sizes change it (jax).

For logical axes, the step is built on a mesh with an axis of size 1 for every logical axis, and a
mapping to these. The shardings of its program then show which dimensions each logical axis splits,
whatever library makes them, so the choices of a search space need not be tried one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import MAPPING, Knobs, MeshAxis
from automesh.mesh.mapping import LogicalAxes
from automesh.program.lower.any_step import StepProgram, lower_any
from automesh.program.lower.lowering import SingleProgram, lower
from automesh.program.notes import note
from automesh.program.nouns import Entry
from automesh.program.script.build import Built, build_on
from automesh.sharding.logical_splits import split_arrays
from automesh.sharding.passes import plain
from automesh.sharding.programs import lowered_for, text_of
from automesh.space.mapping import SplitArray, SplitDimension, StepMapping
from automesh.texts.exceptions import in_one_line
from automesh.worker.handlers.stages import StageReporter
from automesh.worker.messages import ArraysJob, InspectJob


def ones(names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    """Returns the axes of a mesh of one device."""
    return tuple(MeshAxis(name=name) for name in names)


def own_mesh(entry: Entry, names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    """Returns the mesh of an unmodified script; for others, that of one device."""
    if entry.capture is None or entry.capture.layout is not None:
        return ones(names)
    sizes = dict(entry.capture.searched.axes)
    return tuple(MeshAxis(name=name, ici=sizes.get(name, 1)) for name in names)


def looked_at(entry: Entry, names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    """Returns the mesh on which a step is looked at: of one device; for a script that is run for
    each mesh, its own mesh, since it may refuse others, such as a pipeline of one stage."""
    return own_mesh(entry, names) if entry.is_run_for_each else ones(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A step on the mesh on which it is looked at first.

    Attributes:
      axes: of that mesh.
    """

    axes: tuple[MeshAxis, ...]
    built: Built
    program: StepProgram


def look(
    build: Callable[..., Any],
    job: InspectJob,
    mapping: LogicalAxes,
    *,
    devices: Sequence[Any],
    stages: StageReporter,
) -> Looked:
    """Builds and lowers a step on the mesh of `looked_at`; if a script refuses one device, on its
    own mesh.

    Raises:
      Exception: whatever the user's code raises.
    """
    entry = job.step.entry
    capture = entry.capture
    known = capture is not None and capture.searched.names == job.axis_names
    axis_types = capture.searched.axis_types if capture is not None and known else ()
    platforms = lowered_for(job.step.absent.platform) if job.step.absent else None
    first, own = looked_at(entry, job.axis_names), own_mesh(entry, job.axis_names)

    def on(axes: tuple[MeshAxis, ...]) -> Looked:
        stages.enter("build")
        built = build_on(build, axes, axis_types=axis_types, mapping=mapping, devices=devices)
        stages.enter("lower")
        return Looked(axes=axes, built=built, program=lower_any(built, platforms=platforms))

    try:
        return on(first)
    # jax, libraries and the script itself refuse a mesh each in its own way.
    except Exception as error:
        if first == own:
            raise
        note(f"its step cannot be taken to one device ({in_one_line(error)})")
        return on(own)


@dataclass(slots=True, kw_only=True)
class Trials:
    """Lowers the step at sizes that it may refuse; see `Inspection.seen`.

    Attributes:
      devices: the devices of this process.
      knobs: keyword arguments for `build`.
    """

    build: Callable[..., Any]
    job: InspectJob | ArraysJob
    axis_types: tuple[str, ...]
    devices: Sequence[Any]
    knobs: Knobs = ()
    seen: Counter[str] = field(default_factory=Counter[str])

    def named(
        self, active: tuple[str, ...], size: int, mapping: LogicalAxes
    ) -> tuple[str, ...] | None:
        """Returns those axes of `active` that the step's shardings name when each has size `size`;
        None if the step refuses these sizes."""
        names, platform = self.job.axis_names, self.job.platform
        axes = [MeshAxis(name=one, ici=size if one in active else 1) for one in names]
        try:
            built = build_on(
                self.build,
                axes,
                axis_types=self.axis_types,
                mapping=mapping,
                knobs=self.knobs,
                devices=self.devices,
            )
            program = lower_any(built, platforms=lowered_for(platform) if platform else None)
        # The user's code may refuse these sizes for any reason; no axis is excluded by that.
        except Exception as error:  # noqa: BLE001
            mesh = ",".join(f"{name}:{size}" for name in active)
            note(f"`{mesh}` cannot be lowered ({in_one_line(error)})")
            return None
        if platform and isinstance(program, SingleProgram):
            self.seen[text_of(plain(program.lowered.compiler_ir("stablehlo")))] += 1
        named = program.named_axes(names)
        return tuple(name for name in active if name in named)


def used_axes(
    trials: Trials,
    names: tuple[str, ...],
    mapping: LogicalAxes = (),
    *,
    known: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the axes that the step uses. They are tried at sizes above 1, since some scripts
    ignore others.

    As many axes as the devices allow are tried at once. An axis that is not named then is tried
    alone, since the step may use it only while others are 1.

    The knobs have their defaults, since another value may end the process, and with it the search.

    Args:
      mapping: the searched logical axes. They are not split here, so that only axes are found that
        the step uses with any mapping.
      known: axes that it is known to use, which are not tried.
    """
    unmapped = tuple((name, ()) for name, _ in mapping)
    devices = len(trials.devices)
    size = next((p for p in range(2, devices + 1) if devices % p == 0), 1)
    most = max(1, next(n for n in range(devices + 1) if size ** (n + 1) > devices or size == 1))
    used = set(known)
    unknown = [name for name in names if name not in used]
    for first in range(0, len(unknown), most):
        together = tuple(unknown[first : first + most])
        if len(together) > 1:
            used.update(trials.named(together, size, unmapped) or ())
    for name in names:
        if name not in used and trials.named((name,), size, unmapped) != ():
            used.add(name)
    return tuple(name for name in names if name in used)


_STANDS_FOR = "logical_axis_{}"


def default_mapping(defaults: LogicalAxes | None, listed: LogicalAxes) -> LogicalAxes:
    """Returns the mapping that `build` gets by default: its own one, completed by the first choices
    of the search space.

    Returns:
      The mapping; empty if the space lists no logical axis, or `build` takes none.
    """
    if defaults is None or not listed:
        return ()
    return tuple({**dict(listed), **dict(defaults)}.items())


def seen_mapping(trials: Trials, defaults: LogicalAxes, mapping: LogicalAxes) -> StepMapping:
    """Finds which array dimensions the logical axes split, at the knobs of the trials.

    Args:
      defaults: default of `build`'s keyword.
      mapping: result of `default_mapping`.
    """
    if not mapping:
        return StepMapping(defaults=defaults)
    logical = [name for name, _ in mapping]
    arrays = _arrays(trials, logical, {})
    if isinstance(arrays, str):
        return StepMapping(defaults=defaults, unseen=arrays)
    found = StepMapping(defaults=defaults, arrays=arrays)
    for name in logical:
        if name not in found.logical:
            # Some scripts shard only over axes larger than 1.
            more = _arrays(trials, logical, {name: 2}) if len(trials.devices) > 1 else ()
            found = StepMapping(
                defaults=defaults, arrays=(*found.arrays, *(() if isinstance(more, str) else more))
            )
    return StepMapping(defaults=defaults, arrays=_without_rounded(trials, logical, found.arrays))


def _arrays(
    trials: Trials, logical: list[str], sizes: Mapping[str, int]
) -> tuple[SplitArray, ...] | str:
    """Returns the arrays of the step on a mesh with an axis for every logical axis; or why this
    fails.

    Args:
      sizes: sizes of the axes that are larger than 1.
    """
    standing = {_STANDS_FOR.format(place): name for place, name in enumerate(logical)}
    names, platform = trials.job.axis_names, trials.job.platform
    axes = [MeshAxis(name=name) for name in names]
    axes += [MeshAxis(name=axis, ici=sizes.get(name, 1)) for axis, name in standing.items()]
    # If the axes differ in type, the axes for logical axes are Auto.
    types = trials.axis_types
    more = types[0] if types and len(set(types)) == 1 else "auto"
    try:
        built = build_on(
            trials.build,
            axes,
            axis_types=(*types, *(more for _ in standing)) if types else (),
            mapping=tuple((name, (axis,)) for axis, name in standing.items()),
            knobs=trials.knobs,
            devices=trials.devices,
        )
        program = lower(built, platforms=lowered_for(platform) if platform else None)
        return split_arrays(program, {axis: MAPPING + name for axis, name in standing.items()})
    # The user's code may refuse such a mesh for any reason; the search goes on.
    except Exception as error:  # noqa: BLE001
        note(f"logical axes {logical} at {dict(sizes)}: {in_one_line(error)}")
        return in_one_line(error)


def _without_rounded(
    trials: Trials, logical: list[str], arrays: tuple[SplitArray, ...]
) -> tuple[SplitArray, ...]:
    """Leaves out the sizes of dimensions that the step rounds up until they divide evenly.

    Each is tried with the smallest mesh axis whose size does not divide it.
    """
    devices = len(trials.devices)
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    rounded: set[tuple[str, int]] = set()
    for name in logical:
        for size in sorted(_sizes(arrays, name)):
            uneven = next((divisor for divisor in divisors if size % divisor), 0)
            if not uneven:
                continue
            tried = _arrays(trials, logical, {name: uneven})
            # A mesh that is refused here will be refused in the search.
            if not isinstance(tried, str) and size not in _sizes(tried, name):
                rounded.add((MAPPING + name, size))
    return tuple(_flexible(array, rounded) for array in arrays)


def _sizes(arrays: tuple[SplitArray, ...], logical: str) -> set[int]:
    parts = (part for array in arrays for part in array.split)
    return {part.size for part in parts if MAPPING + logical in part.names}


def _flexible(array: SplitArray, rounded: set[tuple[str, int]]) -> SplitArray:
    """Returns the array with size 0, which every number divides, for dimensions that the step
    rounds up."""
    parts = tuple(
        SplitDimension(
            place=part.place,
            size=0 if any((name, part.size) in rounded for name in part.names) else part.size,
            names=part.names,
        )
        for part in array.split
    )
    return SplitArray(name=array.name, split=parts)
