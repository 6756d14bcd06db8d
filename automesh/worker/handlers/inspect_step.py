"""Lowering a step at small sizes, to see which axes it uses and whether sizes change it (jax).

Of logical axes it tells its arrays, with an axis of the mesh for each: the step is built on a mesh
that has an axis of size 1 for every logical axis, and a mapping to these. The shardings of its
program then show which dimensions each logical axis splits, whatever library makes them, and the
choices of a search space need not be tried one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import MAPPING, Knobs, MeshAxis
from automesh.mesh.mapping import LogicalAxes
from automesh.program.lower.any_step import lower_any
from automesh.program.lower.lowering import SingleProgram, lower
from automesh.program.notes import in_one_line, note
from automesh.program.script.build import build_on
from automesh.sharding.logical_splits import split_arrays
from automesh.sharding.passes import plain
from automesh.sharding.programs import lowered_for, text_of
from automesh.space.mapping import SplitArray, SplitDimension, StepMapping
from automesh.worker.messages import ArraysJob, InspectJob


@dataclass(slots=True, kw_only=True)
class Trials:
    """Lowers the step at sizes that it may refuse; see `Inspection.seen`.

    Attributes:
      devices: those that are here.
      knobs: for `build`.
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
        """Those of `active` that the step names while they have `size`; None if it refuses them."""
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
        # The user's code may refuse these sizes for any reason: that rules no axis out.
        except Exception as error:  # noqa: BLE001
            mesh = ",".join(f"{name}:{size}" for name in active)
            note(f"`{mesh}` cannot be lowered ({in_one_line(error)})")
            return None
        if platform and isinstance(program, SingleProgram):
            self.seen[text_of(plain(program.lowered.compiler_ir("stablehlo")))] += 1
        named = program.named_axes(names)
        return tuple(name for name in active if name in named)


def used_axes(trials: Trials, names: tuple[str, ...], mapping: LogicalAxes = ()) -> tuple[str, ...]:
    """The axes that the step names when they are larger than 1: some scripts leave out the rest.

    As many axes as the devices allow are tried at once. One that is not named then is tried alone:
    the step may use it only while others are 1.

    Judged at the default knobs: another value may end the process, which here would end the search.

    Args:
      mapping: logical axes that are searched: they are not split here, so that what is left are the
        axes that the step uses whatever its mapping.
    """
    unmapped = tuple((name, ()) for name, _ in mapping)
    devices = len(trials.devices)
    size = next((p for p in range(2, devices + 1) if devices % p == 0), 1)
    most = max(1, next(n for n in range(devices + 1) if size ** (n + 1) > devices or size == 1))
    used: set[str] = set()
    for first in range(0, len(names), most):
        together = names[first : first + most]
        if len(together) > 1:
            used.update(trials.named(together, size, unmapped) or ())
    for name in names:
        if name not in used and trials.named((name,), size, unmapped) != ():
            used.add(name)
    return tuple(name for name in names if name in used)


_STANDS_FOR = "logical_axis_{}"


def default_mapping(defaults: LogicalAxes | None, listed: LogicalAxes) -> LogicalAxes:
    """What `build` is given where nothing else is said: its own mapping, and the first choice of
    the search space for what that leaves out.

    Returns:
      Nothing if the space lists no logical axis, or `build` takes none.
    """
    if defaults is None or not listed:
        return ()
    return tuple({**dict(listed), **dict(defaults)}.items())


def seen_mapping(trials: Trials, defaults: LogicalAxes, mapping: LogicalAxes) -> StepMapping:
    """What the step says of its logical axes, at the knobs of the trials.

    Args:
      defaults: of `build`'s keyword.
      mapping: as `default_mapping` gives it.
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
            # Some scripts shard only over axes that are larger than 1.
            more = _arrays(trials, logical, {name: 2}) if len(trials.devices) > 1 else ()
            found = StepMapping(
                defaults=defaults, arrays=(*found.arrays, *(() if isinstance(more, str) else more))
            )
    return StepMapping(defaults=defaults, arrays=_without_rounded(trials, logical, found.arrays))


def _arrays(
    trials: Trials, logical: list[str], sizes: Mapping[str, int]
) -> tuple[SplitArray, ...] | str:
    """The arrays of the step with an axis for every logical axis; or why it cannot be built so.

    Args:
      sizes: of those that are larger than 1.
    """
    standing = {_STANDS_FOR.format(place): name for place, name in enumerate(logical)}
    names, platform = trials.job.axis_names, trials.job.platform
    axes = [MeshAxis(name=name) for name in names]
    axes += [MeshAxis(name=axis, ici=sizes.get(name, 1)) for axis, name in standing.items()]
    # Where the axes differ in type, those that stand for others are Auto.
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
    # The user's code may refuse such a mesh for any reason, which must not end the search.
    except Exception as error:  # noqa: BLE001
        note(f"logical axes {logical} at {dict(sizes)}: {in_one_line(error)}")
        return in_one_line(error)


def _without_rounded(
    trials: Trials, logical: list[str], arrays: tuple[SplitArray, ...]
) -> tuple[SplitArray, ...]:
    """Leaves out the sizes of dimensions that the step rounds up until they divide evenly.

    They are tried at the least size that a mesh axis may have and that does not divide them.
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
            # If it is refused here, it will be in the search.
            if not isinstance(tried, str) and size not in _sizes(tried, name):
                rounded.add((MAPPING + name, size))
    return tuple(_flexible(array, rounded) for array in arrays)


def _sizes(arrays: tuple[SplitArray, ...], logical: str) -> set[int]:
    parts = (part for array in arrays for part in array.split)
    return {part.size for part in parts if MAPPING + logical in part.names}


def _flexible(array: SplitArray, rounded: set[tuple[str, int]]) -> SplitArray:
    """The array with a size of 0, which everything divides, for dimensions that are rounded."""
    parts = tuple(
        SplitDimension(
            place=part.place,
            size=0 if any((name, part.size) in rounded for name in part.names) else part.size,
            names=part.names,
        )
        for part in array.split
    )
    return SplitArray(name=array.name, split=parts)
