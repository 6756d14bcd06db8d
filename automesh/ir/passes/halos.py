"""Halos: rows that a device needs of others along a split dimension.

`exchange_halos` handles convolutions; `exchange_rows` handles slices, pads, sliding windows, rolls
and reversals; `gather_windows` does what the partitioner does where rows cannot be exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from automesh.hlo.nouns import WindowDimension
from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.passes.edits import blocks, like, set_operands
from automesh.ir.passes.row_exchange import RowWindow, permuted_rows, rotated_rows
from automesh.ir.passes.simplify import OWN_CHANNEL

# Of a permute that is no halo: the array whose rows it sends, and the name of what takes it apart.
ROWS_OF = "rows_of"
# What moves of smaller arrays is not worth a propagation of its own for every size of an axis.
_SMALL_BYTES = 1 << 16


def exchange_halos(graph: Graph) -> None:
    """Rewrites convolution(x, ...) to convolution(concatenate(halo, x, halo), ...).

    Every device sends rows at its two ends to its neighbours: as many as the image is padded with
    at that end, less the holes of a dilated image.
    """
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for operation in list(block.operations):
            if operation.name != "convolution":
                continue
            place = block.operations.index(operation)
            for dimension, window in _split_along(operation):
                image = operation.operands[0]
                made = [*_halos(image, dimension, window, sizes, operation.source)]
                halos = [one.results[0] for one in made if one.name == "collective_permute"]
                if halos:
                    joined = like(image)
                    made.append(
                        Operation(
                            name="concatenate",
                            operands=[image, *halos],
                            results=[joined],
                            attributes={"dim": dimension},
                            source=operation.source,
                        )
                    )
                    set_operands(operation, [joined, *operation.operands[1:]])
                    block.operations[place:place] = made
                    place += len(made)


def _split_along(convolution: Operation) -> Iterator[tuple[int, WindowDimension]]:
    """Finds dimensions of the image that are split together with the result, or with the kernel."""
    image, kernel = convolution.operands[:2]
    result, found = convolution.results[0], convolution.attributes
    spatial = zip(found["lhs_spatial"], found["rhs_spatial"], found["out_spatial"], strict=True)
    for (of_image, of_kernel, of_result), window in zip(spatial, found["window"], strict=True):
        if image.axes[of_image] and (result.axes[of_result] or kernel.axes[of_kernel]):
            yield of_image, window


def _halos(
    image: Value, dimension: int, window: WindowDimension, sizes: dict[str, int], source: str
) -> Iterator[Operation]:
    axes = image.axes[dimension]
    for padding in (window.padding_low, window.padding_high):
        rows = max(0, padding // window.base_dilation)
        if not rows:
            continue
        shape, split = list(image.shape), list(image.axes)
        shape[dimension], split[dimension] = rows, ()
        ends, halo = (
            Value(shape=tuple(shape), dtype=image.dtype, axes=tuple(split), manual=image.manual)
            for _ in range(2)
        )
        yield Operation(name="slice", operands=[image], results=[ends], source=source)
        yield Operation(
            name="collective_permute",
            operands=[ends],
            results=[halo],
            attributes={
                "axes": axes,
                "group": math.prod(sizes.get(axis, 1) for axis in axes),
                "exact": True,
                OWN_CHANNEL: True,
            },
            source=source,
        )


def exchange_rows(graph: Graph) -> None:
    """Rewrites slice(x) to concatenate(slice(x), permuted rows); windows, rolls and reversals
    likewise.

    What a device needs of the others' rows along a split dimension comes in permutes. Where the
    partitioner gathers the whole array instead, nothing is changed here.
    """
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for move in list(_moves(block, sizes)):
            rows = move.rows(_parts(move, sizes))
            if rows:
                _exchange(block, move, rows, sizes)


def gather_windows(graph: Graph) -> None:
    """Rewrites reduce_window(x) to reduce_window(all_gather(x)) where a window has all rows before,
    as in a running sum.

    Rows cannot be exchanged then. Every device gathers all rows and makes its part of the result.
    """
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for operation in [one for one in block.operations if one.name == "reduce_window"]:
            source = operation.operands[0]
            along = {
                dimension
                for dimension, window in enumerate(_of_reduction(operation))
                if is_split(source, dimension)
                and permuted_rows(window, _count(source.axes[dimension], sizes)) is None
            }
            if len(operation.results) == 1 and along:
                _gather_rows(block, operation, along, sizes)


def _gather_rows(
    block: Block, operation: Operation, along: set[int], sizes: dict[str, int]
) -> None:
    """Makes every device gather what the operation reads along some dimensions."""
    source = operation.operands[0]
    over = _gathered(source, sizes, along)
    whole = _kept_by_manual(source, along)
    place = block.operations.index(operation)
    block.operations.insert(
        place,
        Operation(
            name="all_gather",
            operands=[source],
            results=[whole],
            attributes=over,
            source=operation.source,
        ),
    )
    set_operands(operation, [whole, *operation.operands[1:]])


def _gathered(
    value: Value, sizes: dict[str, int], along: Collection[int] | None = None
) -> dict[str, Any]:
    """Returns the attributes of a gather of what the partitioner has split.

    Args:
      along: the dimensions; None: all.
    """
    manual = set(value.manual)
    left = tuple(
        tuple(axis for axis in axes if axis not in manual and (along is None or d in along))
        for d, axes in enumerate(value.axes)
    )
    axes = tuple(dict.fromkeys(axis for split in left for axis in split))
    return {"axes": axes, "group": _count(axes, sizes), "per_dimension": left}


def _kept_by_manual(value: Value, along: Collection[int] | None = None) -> Value:
    """Copies a value, gathered along some dimensions, or along all."""
    manual = set(value.manual)
    return like(
        value,
        axes=tuple(
            tuple(axis for axis in axes if axis in manual or (along is not None and d not in along))
            for d, axes in enumerate(value.axes)
        ),
    )


def axes_of_odd_moves(graph: Graph) -> frozenset[str]:
    """Finds axes for which no formula gives the bytes of moved rows: at other sizes other rows
    move.

    Rows of a halo are the same at all sizes, and the parts of a reversed array are as much smaller
    as there are more of them. Which rows of a slice lie elsewhere changes from size to size.
    """
    sizes = dict(graph.mesh)
    return frozenset(
        axis
        for block in blocks(graph)
        for move in _moves(block, sizes)
        if move.source.global_bytes > _SMALL_BYTES
        and not move.whole_parts
        and not _is_halo(move, _parts(move, sizes))
        for axis in move.axes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """An operation that needs rows of other devices along one dimension.

    Attributes:
      source: the array whose rows these are.
      rows: returns the rows of each permute for a number of parts; see `row_exchange`.
      whole_parts: True if each device sends all that it has.
    """

    operation: Operation
    source: Value
    dimension: int
    rows: Callable[[int], tuple[int, ...]]
    whole_parts: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return self.source.axes[self.dimension]


def _moves(block: Block, sizes: dict[str, int]) -> Iterator[_Move]:
    rolled = set[Operation]()
    for operation in block.operations:
        if operation.name == "concatenate" and (found := _rotation(operation)) is not None:
            rolled.update(one.producer for one in operation.operands if one.producer is not None)
            yield found
    for operation in block.operations:
        # A slice that another rewrite put in states no rows: it cuts one device's part.
        if operation.name in _WINDOWS and operation.attributes and operation not in rolled:
            yield from _windows(operation, sizes)
        elif operation.name == "reverse":
            yield from _reversals(operation)


def _windows(operation: Operation, sizes: dict[str, int]) -> Iterator[_Move]:
    source, result = operation.operands[0], operation.results[0]
    if len(operation.results) > 1:
        return
    for dimension, window in enumerate(_WINDOWS[operation.name](operation)):
        # A dimension whose result is split otherwise is resharded: that is no halo. Nor do rows
        # move for a result that has fewer of them than there are devices: it is not split.
        parts = _count(source.axes[dimension], sizes)
        if (
            is_split(source, dimension)
            and result.axes[dimension] == source.axes[dimension]
            and window.results >= parts
        ):
            yield _Move(
                operation=operation,
                source=source,
                dimension=dimension,
                rows=lambda parts, window=window: permuted_rows(window, parts) or (),
            )


def _of_slice(operation: Operation) -> Iterator[RowWindow]:
    before, after = stated(operation.operands[0]), stated(operation.results[0])
    found = operation.attributes
    for rows, results, start, stride in zip(
        before, after, found["start"], found["stride"], strict=True
    ):
        yield RowWindow(rows=rows, results=results, low=-start, stride=stride)


def _of_reduction(operation: Operation) -> Iterator[RowWindow]:
    before, after = stated(operation.operands[0]), stated(operation.results[0])
    found = operation.attributes
    if found["dilated"]:
        return
    strides = found["stride"] or (1,) * len(before)
    for rows, results, width, stride, (low, _) in zip(
        before, after, found["window"], strides, found["padding"], strict=True
    ):
        yield RowWindow(rows=rows, results=results, width=width, stride=stride, low=low)


def _of_pad(operation: Operation) -> Iterator[RowWindow]:
    before, after = stated(operation.operands[0]), stated(operation.results[0])
    found = operation.attributes
    if not any(found["interior"]):
        for rows, results, low in zip(before, after, found["low"], strict=True):
            yield RowWindow(rows=rows, results=results, low=low)


_WINDOWS = {"slice": _of_slice, "pad": _of_pad, "reduce_window": _of_reduction}


def _rotation(operation: Operation) -> _Move | None:
    """Returns the two ends of an array, put together the other way round, as `jnp.roll` does."""
    dimension = operation.attributes["dim"]
    makers = [one.producer for one in operation.operands]
    if len(makers) != 2 or any(one is None or one.name != "slice" for one in makers):
        return None
    first, second = (one for one in makers if one is not None)
    source, cut = first.operands[0], first.attributes["start"][dimension]
    rows = stated(source)[dimension]
    is_rotation = (
        source is second.operands[0]
        and first.attributes["limit"][dimension] == rows
        and second.attributes["start"][dimension] == 0
        and second.attributes["limit"][dimension] == cut
        and stated(operation.results[0]) == stated(source)
        and is_split(source, dimension)
        and operation.results[0].axes[dimension] == source.axes[dimension]
    )
    if not is_rotation:
        return None
    return _Move(
        operation=operation,
        source=source,
        dimension=dimension,
        rows=lambda parts: rotated_rows(rows, rows - cut, parts),
    )


def _reversals(operation: Operation) -> Iterator[_Move]:
    source = operation.operands[0]
    for dimension in operation.attributes["dims"]:
        if is_split(source, dimension):
            rows = source.shape[dimension]
            yield _Move(
                operation=operation,
                source=source,
                dimension=dimension,
                rows=lambda parts, rows=rows: (rows // parts,),
                whole_parts=True,
            )


def is_split(value: Value, dimension: int) -> bool:
    """Whether the partitioner splits a dimension. Inside a manual region a slice cuts one device's
    part."""
    axes = value.axes[dimension]
    return bool(axes) and not set(axes) & set(value.manual)


def stated(value: Value) -> tuple[int, ...]:
    """Returns the sizes that the program states, without the padding of uneven parts."""
    return value.stated or value.shape


def _parts(move: _Move, sizes: dict[str, int]) -> int:
    return _count(move.axes, sizes)


def _count(axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _is_halo(move: _Move, parts: int) -> bool:
    """Whether twice as many devices would move the same rows; then all other sizes of the axis do,
    too. If each device has a single row, half as many devices tell."""
    is_single = move.source.shape[move.dimension] < 2 * parts
    return move.rows(parts) == move.rows(parts // 2 if is_single and parts > 1 else 2 * parts)


def _exchange(block: Block, move: _Move, rows: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Lets the operation make its own part alone, and joins that with what others send."""
    operation, dimension = move.operation, move.dimension
    parts = _parts(move, sizes)
    place = block.operations.index(operation)
    is_halo = _is_halo(move, parts) and not move.whole_parts
    own = like(operation.results[0])
    pieces = [own]
    made: list[Operation] = []
    for count in rows:
        shape, split = list(move.source.shape), list(move.source.axes)
        # Rows of a halo are as many at all sizes; others are a share of the array.
        shape[dimension] = count if is_halo else count * parts
        split[dimension] = () if is_halo else split[dimension]
        sent, got = (
            Value(
                shape=tuple(shape),
                dtype=move.source.dtype,
                axes=tuple(split),
                manual=move.source.manual,
            )
            for _ in range(2)
        )
        made += [
            Operation(
                name="slice", operands=[move.source], results=[sent], source=operation.source
            ),
            Operation(
                name="collective_permute",
                operands=[sent],
                results=[got],
                attributes={
                    "axes": move.axes,
                    "group": parts,
                    "exact": True,
                    OWN_CHANNEL: True,
                    **({} if is_halo else {"of": operation.name, ROWS_OF: move.source}),
                },
                source=operation.source,
            ),
        ]
        pieces.append(got)
    if move.whole_parts:
        set_operands(operation, pieces[1:])
        block.operations[place:place] = made
        return
    joined = Operation(
        name="concatenate",
        operands=pieces,
        results=list(operation.results),
        attributes={"dim": dimension},
        source=operation.source,
    )
    operation.results = [own]
    own.producer = operation
    if operation.name == "concatenate":  # Of a roll, a device's own rows are a slice.
        set_operands(operation, [move.source])
        operation.name, operation.attributes = "slice", {}
    block.operations[place + 1 : place + 1] = [*made, joined]
