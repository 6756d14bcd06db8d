"""Rules for dimensions of slices, padding, concatenation, lookups and scatters (no jax).

A part of a dimension is never split like the whole: it is a piece of it. Lookups are recorded in
`Events`: the dimensions that indices choose in, and those of the indices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from automesh.program.infer.dimensions import Dim, DimensionMark, Dims
from automesh.program.infer.operation import ArrayOrigin, Lookup, Rule, Segments, TracedOperation


def _slice(op: TracedOperation) -> list[Dims]:
    starts, limits = op.params["start_indices"], op.params["limit_indices"]
    strides = op.params["strides"] or (1,) * len(starts)
    found: list[Dim] = []
    cuts = zip(op.ins[0], op.given[0], op.shapes[0], starts, limits, strides, strict=True)
    for dim, size, kept, start, _, stride in cuts:
        if kept == size:
            found.append(dim)
        elif not op.made[0]:  # Constants, such as positions, can be computed in parts of any form.
            found.append(op.all.new(kept))
        elif stride != 1 and kept > 1:
            op.all.mark(dim, DimensionMark.SHIFTED)
            found.append(op.all.new(kept, DimensionMark.SHIFTED))
        else:
            op.all.mark(dim, DimensionMark.PICKED if kept == 1 else DimensionMark.CUT)
            found.append(op.all.piece(dim, start, kept))
    return [tuple(found)]


def _split(op: TracedOperation) -> list[Dims]:
    axis = op.params["axis"] % len(op.given[0])
    found: list[Dims] = []
    begin = 0
    for size in map(int, op.params["sizes"]):
        if size == 1 < op.given[0][axis]:
            op.all.mark(op.ins[0][axis], DimensionMark.PICKED)
        op.all.mark(op.ins[0][axis], DimensionMark.CUT)
        part = op.all.piece(op.ins[0][axis], begin, size)
        found.append(tuple(part if i == axis else dim for i, dim in enumerate(op.ins[0])))
        begin += size
    return found


def _concatenate(op: TracedOperation) -> list[Dims]:
    axis = op.params["dimension"]
    whole = op.all.new(op.shapes[0][axis])
    # Constants, such as the sines and cosines of positions, can be computed in parts of any form.
    is_constant = not op.together()
    begin = 0
    for dims, given in zip(op.ins, op.given, strict=True):
        for place, dim in enumerate(dims):
            if place != axis:
                op.all.join(op.ins[0][place], dim)
        if is_constant:
            continue
        op.all.mark(whole, DimensionMark.PUT)
        op.all.join(op.all.piece(whole, begin, given[axis]), dims[axis])
        begin += given[axis]
    return [tuple(whole if i == axis else dim for i, dim in enumerate(op.ins[0]))]


def _pad(op: TracedOperation) -> list[Dims]:
    found: list[Dim] = []
    cuts = zip(op.ins[0], op.given[0], op.shapes[0], op.params["padding_config"], strict=True)
    for dim, size, made, (low, high, inner) in cuts:
        if (low, high, inner) == (0, 0, 0):
            found.append(dim)
            continue
        whole = op.all.new(made)
        if inner == 0 and low >= 0 and high >= 0:
            # The inverse of a slice, as in the gradient of a slice.
            op.all.mark(whole, DimensionMark.PUT)
            op.all.join(op.all.piece(whole, low, size), dim)
        elif inner == 0 and low <= 0 and high <= 0:
            op.all.mark(dim, DimensionMark.CUT)
            op.all.join(op.all.piece(dim, -low, made), whole)
        else:
            op.all.mark(dim, DimensionMark.SHIFTED)
            op.all.mark(whole, DimensionMark.SHIFTED)
        found.append(whole)
    return [tuple(found)]


def _dynamic_slice(op: TracedOperation) -> list[Dims]:
    found: list[Dim] = []
    looked: list[Dim] = []
    cuts = zip(op.ins[0], op.given[0], op.shapes[0], strict=True)
    for place, (dim, size, kept) in enumerate(cuts):
        if kept == size:
            found.append(dim)
            continue
        op.all.mark(dim, DimensionMark.SLICED)
        looked.append(dim)
        found.append(op.all.new(kept))
        source = op.sources[1 + place] if 1 + place < len(op.sources) else ()
        if kept == 1 and len(source) == 1:
            op.events.chosen.setdefault(source[0], []).append(dim)
    if looked:
        sliced = [
            place
            for place, (size, kept) in enumerate(zip(op.given[0], op.shapes[0], strict=True))
            if size != kept
        ]
        is_row = sliced[0] == 0 and any(size > 1 for size in op.shapes[0])
        # What is left of a prepared batch has rows and features; of a column, rows alone.
        is_batch = sum(size > 1 for size in op.shapes[0]) > 1
        takes_rows = is_row or is_batch or any(op.shapes[0][place] > 1 for place in sliced)
        made = tuple(found)
        _note_lookup(op, tuple(looked), (), made, made, takes_rows=takes_rows)
    return [tuple(found)]


def _dynamic_update_slice(op: TracedOperation) -> list[Dims]:
    whole, update = op.ins[:2]
    for mine, yours, size, kept in zip(whole, update, op.given[0], op.given[1], strict=True):
        if size == kept:
            op.all.join(mine, yours)
        else:
            op.all.mark(mine, DimensionMark.SLICED)
    return [whole]


def _note_lookup(
    op: TracedOperation,
    looked: Dims,
    by: Dims,
    window: Dims,
    result: Dims,
    *,
    takes_rows: bool = True,
) -> None:
    op.events.lookups.append(
        Lookup(
            looked_up=looked,
            by=by,
            window=window,
            result=result,
            shape=op.shapes[0],
            made=op.made[0],
            chosen_by=functools.reduce(operator.or_, op.made[1:], ArrayOrigin(0)),
            place=op.place(),
            is_forward=not op.is_backward,
            is_by_held=all(op.held[1:2]),
            is_held_whole=op.held[0],
            is_of_windows=any(one in op.events.windows for one in (*op.sources, ())[1]),
            is_float=op.is_float,
            source=(*op.sources, ())[1],
            takes_rows=takes_rows,
        )
    )


def _join_diagonals(op: TracedOperation, places: Sequence[int]) -> frozenset[int]:
    """Joins dimensions of the operand in which each row looks up its own position, as in
    `x[arange(len(x)), labels]`, with the rows. Or each the position of another one, as in
    `x[argsort(time)]`: these rows are all of its rows."""
    columns = op.sources[1]
    found: list[int] = []
    for column, place in zip(columns, places, strict=True) if len(columns) == len(places) else ():
        own, dim = op.events.positions.get(column), op.ins[0][place]
        rows = 0 if own is None else op.all.size_of(op.all.factors(own))
        stride = op.events.strides.get(column, 1)
        if own is not None and rows * stride == op.given[0][place]:
            # Each row has several results, as a query has scores with negatives beside its own.
            op.all.join(own, op.all.split(dim, rows)[0] if stride > 1 else dim)
            found.append(place)
        own = op.events.ordered.get(column)
        if own and op.all.size_of(op.all.factors(own)) == op.given[0][place]:
            op.all.join(own, dim)
            op.all.mark(dim, DimensionMark.ORDERED)
            found.append(place)
    return frozenset(found)


def _join_offsets(op: TracedOperation, places: Sequence[int]) -> Dims:
    """Joins the rows that lie end to end in a dimension with those of the indices, where each row
    looks up places of its own: `x.reshape(-1, width)[places + arange(rows)[:, None] * length]`.
    Tables that fields share are such, too, but are of parameters or unchanged arguments.

    Returns:
      For each of these places of the operand, its dimension in which indices choose: of one with
      such rows, the inner part.
    """
    columns = op.sources[1]
    found = [op.ins[0][place] for place in places]
    for number, column in enumerate(columns if len(columns) == len(places) else ()):
        begins = op.events.offsets.get(column, 0)
        own = op.events.positions.get(begins)
        if own is None or not _is_of_rows(op, column):
            continue
        rows, stride = op.all.size_of(op.all.factors(own)), op.events.strides[begins]
        if rows * stride == op.given[0][places[number]]:
            outer, found[number] = op.all.split(found[number], rows)
            op.all.join(own, outer)
            op.events.by_offset.add(column)
    return tuple(found)


def _is_of_rows(op: TracedOperation, column: int) -> bool:
    """Whether an operand is made of data by the step; in a backward pass, whether its indices have
    chosen in such a one."""
    if op.is_backward:
        return column in op.events.by_offset
    return op.made[0] != ArrayOrigin.STATE and not op.held[0]


def _inside_rows(op: TracedOperation, by: Dims, whole: Dims, inside: Dims) -> Dims:
    """Returns the dimensions of indices without the rows in which each has places of its own.

    Args:
      whole, inside: see `_join_offsets`: dimensions of the operand, and what indices choose in.
    """
    rest = {factor for dim in inside for factor in op.all.factors(dim)}
    rows = {factor for dim in whole for factor in op.all.factors(dim)} - rest
    left = [
        tuple(factor for factor in op.all.factors(dim) if factor not in rows) if rows else dim
        for dim in by
    ]
    return tuple(dim for dim, given in zip(left, by, strict=True) if dim or not given)


def _note_chosen(op: TracedOperation, looked: Sequence[Dim]) -> None:
    """Records which integers choose in which dimensions. Integers that the step computes are places
    of rows, in all parts of a data set; a table of parameters with as many rows is not one."""
    columns = op.sources[1]
    if len(columns) == len(looked):
        for column, dim in zip(columns, looked, strict=True):
            if column and dim and (op.held[0] or column not in op.events.computed):
                op.events.chosen.setdefault(column, []).append(dim)


def _gather(op: TracedOperation) -> list[Dims]:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    operand, indices = op.ins[:2]
    batching = tuple(numbers.operand_batching_dims)
    from_indices = tuple(numbers.start_indices_batching_dims)
    for mine, yours in zip(batching, from_indices, strict=True):
        op.all.join(operand[mine], indices[yours])
    gone = {*numbers.collapsed_slice_dims, *batching}
    windows = iter([place for place in range(len(operand)) if place not in gone])
    by = iter(indices[:-1])
    found: list[Dim] = []
    kept: list[Dim] = []
    for place, size in enumerate(op.shapes[0]):
        if place not in numbers.offset_dims:
            found.append(next(by))
            continue
        from_place = next(windows)
        dim = operand[from_place]
        if size != op.given[0][from_place]:
            dim = op.all.new(size)
        kept.append(dim)
        found.append(dim)
    places = tuple(map(int, numbers.start_index_map))
    own_places = _join_diagonals(op, places)
    inside = _join_offsets(op, places)
    looked = tuple(
        dim
        for place, dim in zip(places, inside, strict=True)
        if sizes[place] != op.given[0][place] and place not in own_places
    )
    for dim in looked:
        op.all.mark(dim, DimensionMark.LOOKED_UP)
    own = tuple(dim for place, dim in enumerate(indices[:-1]) if place not in from_indices)
    own = _inside_rows(op, own, tuple(operand[place] for place in places), inside)
    _note_chosen(op, inside)
    if looked:
        first = next(place for place in range(len(operand)) if place not in batching)
        is_of_rows = sizes[first] != op.given[0][first] and any(kept)
        takes_rows = bool(own) or is_of_rows or len([dim for dim in kept if dim]) > 1
        _note_lookup(op, looked, own, tuple(kept), tuple(found), takes_rows=takes_rows)
    return [tuple(found)]


def _scatter(op: TracedOperation) -> list[Dims]:
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = op.ins[:3]
    batching = tuple(numbers.operand_batching_dims)
    from_indices = tuple(numbers.scatter_indices_batching_dims)
    for mine, yours in zip(batching, from_indices, strict=True):
        op.all.join(operand[mine], indices[yours])
    gone = {*numbers.inserted_window_dims, *batching}
    windows = iter([place for place in range(len(operand)) if place not in gone])
    by = iter(indices[:-1])
    for place, (dim, size) in enumerate(zip(updates, op.given[2], strict=True)):
        if place not in numbers.update_window_dims:
            op.all.join(dim, next(by))
            continue
        into = next(windows)
        if size == op.given[0][into]:
            op.all.join(dim, operand[into])
        else:
            op.all.mark(operand[into], DimensionMark.SLICED)
    into = tuple(map(int, numbers.scatter_dims_to_operand_dims))
    own_places = _join_diagonals(op, into)
    inside = _join_offsets(op, into)
    looked = tuple(dim for place, dim in zip(into, inside, strict=True) if place not in own_places)
    own = tuple(dim for place, dim in enumerate(indices[:-1]) if place not in from_indices)
    own = _inside_rows(op, own, tuple(operand[place] for place in into), inside)
    rows = {op.all.factors(operand[place]) for place in own_places}
    own = tuple(dim for dim in own if op.all.factors(dim) not in rows)
    for dim in looked:
        op.all.mark(dim, DimensionMark.LOOKED_UP)
    _note_chosen(op, inside)
    # The chosen rows of each of a batch, which are added at their own places, are no edges.
    ranked = [op.events.ranked.get(source, ()) for source in op.sources[1]]
    is_back = len(own) == 1 and op.all.factors(own[0]) in [
        op.all.factors(one) for one in ranked if one
    ]
    # Messages of edges are summed nowhere else; what is counted is no message.
    if op.name == "scatter-add" and op.is_float and not is_back:
        for dim in own if not op.is_backward else ():
            op.all.mark(dim, DimensionMark.SUMMED)
        op.events.segments.append(
            Segments(
                into=looked,
                by=own,
                made=op.together(),
                is_forward=not op.is_backward,
                source=op.sources[1],
            )
        )
    return [operand]


RULES: dict[str, Rule] = {
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _scatter,
    ),
}
