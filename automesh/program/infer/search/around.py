"""Makes the search space around the shardings that a script writes itself (no jax).

The script's mesh axes, its batch and the constraints inside of its step stay as they are. What is
varied is how its state is split: parameters and the optimizer's state over batch axes where the
script leaves them whole (as fsdp does), and classes of the parameters over the other axes. Each of
these is a logical axis whose first choice is what the script writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from automesh.mesh.axes import MAPPING
from automesh.program.infer.nouns import ArrayClasses, DimensionClass, StepClasses
from automesh.program.infer.search.layout import (
    CHANGED,
    MOMENTS,
    PARAMS,
    STATE,
    WEIGHTS,
    ChosenClasses,
    Layout,
    NamedSplit,
    Split,
)
from automesh.space.mapping import SplitArray, SplitDimension
from automesh.space.space import LogicalAxis

# Names of logical axes must not be those of classes: `config.apply` would constrain activations.
_OF_WEIGHTS = "_weights"


def lay_around(
    classes: StepClasses,
    written: Sequence[Split | None],
    *,
    axes: Sequence[str],
    batch_axes: Sequence[str],
    num_devices: int,
) -> Layout:
    """Makes the layout of a step around what its script writes.

    Args:
      written: see `Discovery.written`.
      axes: those of the script's mesh.
      batch_axes: of these, the ones that split the batch.

    Returns:
      The layout; without logical axes if there is nothing else to try.
    """
    chosen = ChosenClasses.of(classes, num_devices)
    # What splits the batch is known from the script, even where a `shard_map` hides it.
    chosen = replace(chosen, kept=chosen.kept_dimensions())
    arrays = list(zip(classes.arguments, written, strict=True))
    logical = [
        *_of_state(chosen, arrays, batch_axes),
        *_of_classes(chosen.over_tp, arrays, [axis for axis in axes if axis not in batch_axes]),
    ]
    names = frozenset(axis.name for axis in logical)
    arguments = tuple(
        NamedSplit(
            name=array.name,
            split=_split(chosen, number, own, names, batch_axes),
            classes=array.dims,
            written=own or (),
        )
        for number, (array, own) in enumerate(arrays)
    )
    used = {name for one in arguments for part in one.split for name in part}
    logical = [axis for axis in logical if axis.name in used]
    return Layout(
        axes=tuple(axes),
        slow=tuple(batch_axes),
        batch_axes=tuple(batch_axes),
        logical=tuple(logical),
        arguments=arguments,
        arrays=tuple(_rules(chosen, arguments, batch_axes)),
        notices=(_notice(chosen, logical),),
        keeps_written=True,
    )


def _of_state(
    chosen: ChosenClasses,
    arrays: Sequence[tuple[ArrayClasses, Split | None]],
    batch_axes: Sequence[str],
) -> list[LogicalAxis]:
    """Makes logical axes for parameters and for moments over each batch axis, if the script leaves
    some array of them whole over all batch axes."""
    whole = {
        array.role
        for number, (array, own) in enumerate(arrays)
        if number in chosen.kept and _is_whole(own, batch_axes)
    }
    choices = ((), *((axis,) for axis in batch_axes))
    return [
        LogicalAxis(name=name, choices=choices)
        for name, roles in ((PARAMS, WEIGHTS), (MOMENTS, CHANGED))
        if batch_axes and whole.intersection(roles)
    ]


def _is_whole(own: Split | None, axes: Sequence[str]) -> bool:
    return own is not None and not any(axis in part for part in own for axis in axes)


def _of_classes(
    classes: Iterable[DimensionClass],
    arrays: Sequence[tuple[ArrayClasses, Split | None]],
    axes: Sequence[str],
) -> list[LogicalAxis]:
    """Makes a logical axis for each class, over the axes over which the script does not split every
    array of the state that has the class."""
    found: list[LogicalAxis] = []
    for one in classes:
        written = [
            own[array.dims.index(one.name)]
            for array, own in arrays
            if own is not None and array.role in STATE and one.name in array.dims
        ]
        choices = tuple((axis,) for axis in axes if any(axis not in over for over in written))
        if choices:
            found.append(LogicalAxis(name=one.name + _OF_WEIGHTS, choices=((), *choices)))
    return found


def _split(
    chosen: ChosenClasses,
    number: int,
    own: Split | None,
    names: frozenset[str],
    batch_axes: Sequence[str],
) -> Split:
    """Returns how logical axes split a leaf of the arguments; a class splits its first dimension
    only."""
    array = chosen.classes.arguments[number]
    parts: list[list[str]] = [[] for _ in array.shape]
    if own is None or not chosen.is_state(array):
        return tuple(map(tuple, parts))
    for place, name in enumerate(array.dims):
        if name + _OF_WEIGHTS in names and array.dims.index(name) == place:
            parts[place].append(name + _OF_WEIGHTS)
    kept = chosen.kept.get(number)
    more = PARAMS if array.role in WEIGHTS else MOMENTS
    if kept is not None and more in names and _is_whole(own, batch_axes):
        parts[kept].append(more)
    return tuple(map(tuple, parts))


def _rules(
    chosen: ChosenClasses, arguments: Sequence[NamedSplit], batch_axes: Sequence[str]
) -> Iterable[SplitArray]:
    """Returns the arrays that make mappings illegal; see `ChosenClasses.arrays`."""
    seen: dict[tuple[SplitDimension, ...], str] = {}
    for array, one in zip(chosen.classes.arguments, arguments, strict=True):
        whole: list[SplitDimension] = []
        for place, names in enumerate(one.split):
            if not names:
                continue
            logical = tuple(MAPPING + name for name in names)
            whole.append(SplitDimension(place=place, size=0, names=logical))
            known = chosen.class_named(array.dims[place])
            size = array.shape[place]
            if known is not None:
                local = all(name not in (PARAMS, MOMENTS) for name in names)
                size = (
                    math.gcd(known.parts, size) if local else chosen.stored_parts(known.name, size)
                )
            # An axis that a mapping may give to this dimension is not counted twice.
            own = (axis for axis in one.written[place] if axis in batch_axes)
            every = (*own, *logical)
            seen.setdefault((SplitDimension(place=place, size=size, names=every),), one.name)
        if len(whole) > 1:
            seen.setdefault(tuple(whole), one.name)
    return (SplitArray(name=name, split=parts) for parts, name in seen.items())


def _notice(chosen: ChosenClasses, logical: Sequence[LogicalAxis]) -> str:
    if not logical:
        return (
            "`--infer`: there is no other way to split the state of the step over the script's "
            "axes; it is searched as it is written"
        )
    listed = ", ".join(_in_words(chosen, axis) for axis in logical)
    return (
        f"`--infer`: the script's own shardings are compared with others of its state: {listed}; "
        "its batch, and constraints inside of the step, stay as they are written; to use what is "
        "found, put the state where `config.shardings` of the rule says"
    )


def _in_words(chosen: ChosenClasses, axis: LogicalAxis) -> str:
    over = " or ".join(name for choice in axis.choices for name in choice)
    if axis.name in (PARAMS, MOMENTS):
        what = "parameters" if axis.name == PARAMS else "the optimizer's state"
        return f"`{axis.name}` ({what} that it leaves whole) over {over}"
    name = axis.name.removesuffix(_OF_WEIGHTS)
    return f"`{axis.name}` ({chosen.described(name)}) over {over}"
