"""What XLA's partitioner makes of padded arrays before it splits them (`PreprocessHlos`)."""

from __future__ import annotations

from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.passes.edits import (
    blocks,
    drop,
    like,
    only_user,
    returned_values,
    set_operands,
    take_result,
)
from automesh.ir.passes.halos import is_split, stated


def merge_pads(graph: Graph) -> None:
    """Rewrites slice(pad(x)) to one pad, which may be negative, so that rows move only once.

    The partitioner does so if nothing else reads the pad, and both are split alike along a
    dimension that is padded and cut.
    """
    returned = returned_values(graph)
    for block in blocks(graph):
        merged = {
            one: pad
            for one in block.operations
            if one.name == "slice" and (pad := _cut_pad(one, returned)) is not None
        }
        for cut, pad in merged.items():
            padded = stated(pad.results[0])
            found, bounds = pad.attributes, cut.attributes
            cut.attributes = {
                "low": tuple(
                    low - start for low, start in zip(found["low"], bounds["start"], strict=True)
                ),
                "high": tuple(
                    high + limit - size
                    for high, limit, size in zip(
                        found["high"], bounds["limit"], padded, strict=True
                    )
                ),
                "interior": found["interior"],
            }
            cut.name = "pad"
            set_operands(cut, pad.operands)
        drop(block, set(merged.values()))


def _cut_pad(cut: Operation, returned: set[Value]) -> Operation | None:
    """Returns the pad that a slice alone reads and that may become one with it."""
    pad = cut.operands[0].producer
    if pad is None or pad.name != "pad" or only_user(pad.results[0], returned) is not cut:
        return None
    before, after = pad.results[0], cut.results[0]
    found = pad.attributes
    stays = any(found["interior"]) or any(one != 1 for one in cut.attributes.get("stride", (0,)))
    if stays or before.axes != after.axes:
        return None
    is_moved_twice = any(
        is_split(after, d) and (low or high) and stated(before)[d] != stated(after)[d]
        for d, (low, high) in enumerate(zip(found["low"], found["high"], strict=True))
    )
    return pad if is_moved_twice else None


def gather_padding(graph: Graph) -> None:
    """Rewrites all_gather(x) to slice(all_gather(x)) where parts of x are padded.

    What is gathered has the padding of all parts.
    """
    for block in blocks(graph):
        for gather in list(block.operations):
            if gather.name != "all_gather" or gather.attributes.get("manual"):
                continue
            (source,), (result,) = gather.operands, gather.results
            sizes = tuple(
                padded if gathered else size
                for padded, size, gathered in zip(
                    source.shape, result.shape, gather.attributes["per_dimension"], strict=True
                )
            )
            if source.stated and sizes != result.shape:
                whole = like(result)
                whole.shape = sizes
                take_result(gather, whole)
                cut = Operation(
                    name="slice",
                    operands=[whole],
                    results=[],
                    attributes={
                        "start": (0,) * len(sizes),
                        "limit": result.shape,
                        "stride": (1,) * len(sizes),
                    },
                    source=gather.source,
                )
                take_result(cut, result)
                place = block.operations.index(gather)
                block.operations.insert(place + 1, cut)


def wrap_with_rolls(graph: Graph) -> None:
    """Rewrites concatenate(slice(x), x, slice(x)) to selections of pad(x) and of its rolls.

    Such is the array of a periodic grid with its ghost cells. Each of the two pieces comes into its
    place by a roll of the whole padded array.
    """
    returned = returned_values(graph)
    for block in blocks(graph):
        for operation in list(block.operations):
            if operation.name == "concatenate" and _wraps(operation, returned):
                _wrap(block, operation)


def _wraps(operation: Operation, returned: set[Value]) -> bool:
    if len(operation.operands) != 3:
        return False
    dimension, (result,) = operation.attributes["dim"], operation.results
    source = operation.operands[1]
    pieces = [operation.operands[place].producer for place in (0, 2)]
    return (
        is_split(result, dimension)
        and source.axes == result.axes
        and all(
            one is not None
            and one.name == "slice"
            and "start" in one.attributes
            and one.operands[0] is source
            and one.results[0].axes == result.axes
            and only_user(one.results[0], returned) is operation
            for one in pieces
        )
    )


def _wrap(block: Block, operation: Operation) -> None:
    dimension, (result,) = operation.attributes["dim"], operation.results
    first, source, last = operation.operands
    low, high = (stated(one)[dimension] for one in (first, last))
    rows = stated(result)[dimension]
    rank = len(result.shape)

    def along(number: int) -> tuple[int, ...]:
        return tuple(number if d == dimension else 0 for d in range(rank))

    padded = like(result)
    padded.stated = result.stated
    made = [
        Operation(
            name="pad",
            operands=[source],
            results=[padded],
            attributes={"low": along(low), "high": along(high), "interior": along(0)},
            source=operation.source,
        )
    ]
    kept = padded
    for piece, place in ((first, 0), (last, low + stated(source)[dimension])):
        slicing = piece.producer
        assert slicing is not None
        cut = (slicing.attributes["start"][dimension] + low - place) % rows
        chosen = like(result)
        rolled = _rolled(padded, dimension, cut, made, operation.source) if cut else padded
        is_there = Value(
            shape=result.shape,
            dtype="i1",
            axes=result.axes,
            manual=result.manual,
            is_constant=True,
        )
        made += [
            Operation(name="iota", operands=[], results=[is_there], attributes={"dim": dimension}),
            Operation(
                name="select",
                operands=[is_there, rolled, kept],
                results=[chosen],
                source=operation.source,
            ),
        ]
        kept = chosen
    take_result(made[-1], result)
    place = block.operations.index(operation)
    block.operations[place:place] = made
    drop(block, {operation, *(one.producer for one in (first, last) if one.producer is not None)})


def _rolled(padded: Value, dimension: int, cut: int, made: list[Operation], source: str) -> Value:
    """Adds a roll by which row `cut` of an array becomes the first one."""
    sizes = stated(padded)
    ends: list[Value] = []
    for begin, end in ((cut, sizes[dimension]), (0, cut)):
        shape = tuple(
            end - begin if d == dimension else size for d, size in enumerate(padded.shape)
        )
        part = Value(shape=shape, dtype=padded.dtype, axes=padded.axes, manual=padded.manual)
        made.append(
            Operation(
                name="slice",
                operands=[padded],
                results=[part],
                attributes={
                    "start": tuple(begin if d == dimension else 0 for d in range(len(sizes))),
                    "limit": tuple(end if d == dimension else size for d, size in enumerate(sizes)),
                    "stride": (1,) * len(sizes),
                },
                source=source,
            )
        )
        ends.append(part)
    rolled = like(padded)
    rolled.stated = padded.stated
    made.append(
        Operation(
            name="concatenate",
            operands=ends,
            results=[rolled],
            attributes={"dim": dimension},
            source=source,
        )
    )
    return rolled
