"""Rules for dimensions inside of a `shard_map`, and for its collectives (no jax).

Inside of a `shard_map` an array has the shape of one device's part: of a dimension that its
specification splits, the inner factor. `Dimensions.part` keeps the outer one, so that the whole
dimension is found again where results are put together, or where an `all_gather` does it inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from automesh.program.infer.dimensions import Dimensions, Dims
from automesh.program.infer.operation import Rule, Shape, TracedOperation
from automesh.program.spec_entries import entries_of


def inside(
    every: Dimensions, params: Mapping[str, Any], arrays: Sequence[Dims]
) -> tuple[Any, list[Dims]]:
    """Returns the program inside of a `shard_map`, and the dimensions of its inputs."""
    found = [_split(every, params, *one) for one in zip(arrays, params["in_specs"], strict=True)]
    return params["jaxpr"], found


def outside(every: Dimensions, params: Mapping[str, Any], arrays: Sequence[Dims]) -> list[Dims]:
    """Returns the dimensions of the results of a `shard_map`, from those inside of it."""
    every.join_parts()
    return [_united(every, params, *one) for one in zip(arrays, params["out_specs"], strict=True)]


def _split(every: Dimensions, params: Mapping[str, Any], dims: Dims, spec: Any) -> Dims:
    axes = _axes_of_dimensions(spec, len(dims))
    return tuple(
        every.part(dim, by, _count(params, by)) for dim, by in zip(dims, axes, strict=True)
    )


def _united(every: Dimensions, params: Mapping[str, Any], dims: Dims, spec: Any) -> Dims:
    axes = _axes_of_dimensions(spec, len(dims))
    return tuple(
        every.whole(dim, by, _count(params, by)) for dim, by in zip(dims, axes, strict=True)
    )


def _axes_of_dimensions(spec: Any, rank: int) -> list[tuple[str, ...]]:
    entries = [*entries_of(spec), *[None] * rank][:rank]
    return [(one,) if isinstance(one, str) else tuple(one or ()) for one in entries]


def _count(params: Mapping[str, Any], axes: Sequence[str]) -> int:
    return math.prod(int(params["mesh"].shape[axis]) for axis in axes)


def _axes(op: TracedOperation) -> tuple[str, ...]:
    """Returns the mesh axes of a collective, and its groups of devices, if it has some."""
    name, groups = op.params["axis_name"], op.params.get("axis_index_groups")
    axes = tuple(map(str, name)) if isinstance(name, (tuple, list)) else (str(name),)
    return axes if groups is None else (*axes, str(groups))


def _all_gather(op: TracedOperation) -> list[Dims]:
    place, count = op.params["all_gather_dimension"], int(op.params["axis_size"])
    found: list[Dims] = []
    for dims in op.ins:
        if op.params["tiled"]:
            whole = op.all.whole(dims[place], _axes(op), count)
            found.append((*dims[:place], whole, *dims[place + 1 :]))
        else:
            found.append((*dims[:place], op.all.new(count), *dims[place:]))
    return found


def _reduce_scatter(op: TracedOperation) -> list[Dims]:
    place, count = op.params["scatter_dimension"], int(op.params["axis_size"])
    found: list[Dims] = []
    for dims in op.ins:
        kept = (op.all.part(dims[place], _axes(op), count),) if op.params["tiled"] else ()
        found.append((*dims[:place], *kept, *dims[place + 1 :]))
    return found


def _all_to_all(op: TracedOperation) -> list[Dims]:
    """Splits one dimension over the devices, and puts their parts end to end along another one."""
    split, concat = op.params["split_axis"], op.params["concat_axis"]
    found: list[Dims] = []
    for dims, given, shape in zip(op.ins, op.given, op.shapes, strict=True):
        if op.params["tiled"]:
            made = list(dims)
            if split != concat:
                count = _ratio(given, shape, split)
                made[split] = op.all.part(dims[split], _axes(op), count)
                made[concat] = op.all.whole(dims[concat], _axes(op), count)
        else:
            made = [dim for place, dim in enumerate(dims) if place != split]
            made.insert(concat, op.all.new(shape[concat]))
        found.append(tuple(made))
    return found


def _ratio(given: Shape, shape: Shape, place: int) -> int:
    return given[place] // max(shape[place], 1)


def _same(op: TracedOperation) -> list[Dims]:
    return list(op.ins)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _all_gather),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), _reduce_scatter),
    **dict.fromkeys(("ppermute", "psum_invariant", "unreduced_psum"), _same),
    "all_to_all": _all_to_all,
}
