"""Rewrites of collectives; `RULES` in `ir.passes.run` says which compiler does each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from automesh.ir.graph import IN_CONDITION, Block, Graph, Operation, Value, element_bytes
from automesh.ir.op_kinds import COLLECTIVES
from automesh.ir.passes.edits import (
    Changes,
    blocks,
    drop,
    like,
    only_user,
    replace_value,
    returned_values,
    set_operands,
    take_result,
)

# Attribute of a constant that each device computes: the program does not contain its numbers.
IS_COMPUTED = "is_computed"
_MOVES = frozenset(("reshape", "transpose", "copy"))


def is_manual(operation: Operation) -> bool:
    """Whether the program itself states the collective."""
    return bool(operation.attributes.get("manual"))


def drop_collectives_of_constants(graph: Graph) -> None:
    """Makes each device's part of a constant without communication.

    The places that a sort puts in order with its values move like these: the partitioner splits
    both alike first.
    """
    for block in blocks(graph):
        for operation in block.operations:
            is_made = operation.name in COLLECTIVES and not is_manual(operation)
            if operation.name == "all_to_all" and _are_sorted_places(operation):
                continue
            if is_made and operation.operands[0].is_constant:
                is_computed = not _reads_data(operation.operands[0])
                set_operands(operation, ())
                operation.name = "constant"
                operation.attributes = {"splat": None, IS_COMPUTED: is_computed}


def _are_sorted_places(move: Operation) -> bool:
    made = move.operands[0].producer
    is_places = made is not None and made.name == "iota"
    return is_places and any(user.name == "sort" for user in move.results[0].users)


def _reads_data(constant: Value) -> bool:
    """Whether a constant is made of numbers that the program contains, and not of formulas such as
    zeros, numbers of places, and arithmetic on them."""
    waiting, seen = [constant], {constant}
    while waiting:
        made = waiting.pop().producer
        if made is None:
            continue
        is_data = made.name == "constant" and made.attributes.get("splat") is None
        if is_data and not made.attributes.get(IS_COMPUTED):
            return True
        fresh = [one for one in made.operands if one not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def separate_reductions_from_slices(graph: Graph) -> None:
    """Rewrites reduce_scatter(x) to all_slice(all_reduce(x)), where the program does not state
    it."""
    for block in blocks(graph):
        for place, operation in reversed(list(enumerate(block.operations))):
            if operation.name != "reduce_scatter" or is_manual(operation):
                continue
            whole = like(operation.operands[0])
            reduction = Operation(
                name="all_reduce",
                operands=list(operation.operands),
                results=[whole],
                attributes={
                    key: value for key, value in operation.attributes.items() if key != _BY_DIM
                },
                source=operation.source,
            )
            operation.name = "all_slice"
            set_operands(operation, [whole])
            block.operations.insert(place, reduction)


_BY_DIM = "per_dimension"


def reduce_first_what_is_sliced(graph: Graph) -> None:
    """Rewrites all_slice(all_reduce(product)) to all_reduce(all_slice(all_reduce(product))).

    If the product's own result is split over some of the reduced axes, these are reduced first, and
    the others after the slice.
    """
    returned = returned_values(graph)
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        here = set(block.operations)
        changed: dict[Operation, list[Operation]] = {}
        for operation in block.operations:
            if operation.name != "all_reduce" or is_manual(operation):
                continue
            sliced = only_user(operation.results[0], returned)
            if sliced is None or sliced.name != "all_slice" or sliced not in here:
                continue
            first = sliced.attributes["axes"]
            rest = tuple(axis for axis in operation.attributes["axes"] if axis not in first)
            if first and rest and set(first) <= _split_of_result(operation.operands[0].producer):
                changed |= _reduce_before_and_after(operation, sliced, rest, sizes)
        block.operations = [
            new for operation in block.operations for new in changed.get(operation, [operation])
        ]


def _split_of_result(product: Operation | None) -> set[str]:
    """Returns the axes that split the result of a product before it was reduced and sliced."""
    declared = product.attributes.get("declared") if product else None
    return set(declared[2] or ()) if declared else set()


def _reduce_before_and_after(
    reduction: Operation,
    sliced: Operation,
    rest: tuple[str, ...],
    sizes: dict[str, int],
) -> dict[Operation, list[Operation]]:
    """Makes the operations that replace a reduction and the slice behind it."""
    whole, end = reduction.results[0], sliced.results[0]
    first = _over(
        reduction, sliced.attributes["axes"], sizes, operands=reduction.operands, results=[]
    )
    take_result(first, whole)
    set_operands(reduction, ())
    part = like(end)
    take_result(sliced, part)
    last = _over(reduction, rest, sizes, operands=[part], results=[])
    take_result(last, end)
    return {reduction: [first], sliced: [sliced, last]}


def reduce_by_dimension(graph: Graph) -> None:
    """Splits an all_reduce over axes of different dimensions into one for each dimension."""
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for place, operation in reversed(list(enumerate(block.operations))):
            if operation.name != "all_reduce" or is_manual(operation):
                continue
            groups = _by_dimension(operation)
            if len(groups) < 2:
                continue
            value = operation.operands[0]
            for axes in groups[:-1]:
                partly = like(value)
                block.operations.insert(
                    place, _over(operation, axes, sizes, operands=[value], results=[partly])
                )
                place, value = place + 1, partly
            last = _over(operation, groups[-1], sizes, operands=[value], results=[])
            take_result(last, operation.results[0])
            set_operands(operation, ())
            block.operations[place] = last


def gather_by_dimension(graph: Graph) -> None:
    """Splits an all_gather along several dimensions into one for each, the last dimension first."""
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        changes = Changes(block)
        for operation in list(block.operations):
            if operation.name != "all_gather" or is_manual(operation):
                continue
            split: tuple[tuple[str, ...], ...] = operation.attributes[_BY_DIM]
            places = [place for place, axes in enumerate(split) if axes]
            if len(places) < 2:
                continue
            value, whole = operation.operands[0], operation.results[0]
            made: list[Operation] = []
            for place in reversed(places):
                axes = (*value.axes[:place], whole.axes[place], *value.axes[place + 1 :])
                partly = whole if place == places[0] else like(whole, axes=axes)
                made.append(
                    Operation(
                        name="all_gather",
                        operands=[value],
                        results=[partly],
                        attributes={
                            "axes": split[place],
                            "group": math.prod(sizes.get(axis, 1) for axis in split[place]),
                            _BY_DIM: tuple(
                                axes if d == place else () for d, axes in enumerate(split)
                            ),
                        },
                        source=operation.source,
                    )
                )
                value = partly
            set_operands(operation, ())
            changes.put(operation, made)
        changes.apply()


def _by_dimension(reduction: Operation) -> list[tuple[str, ...]]:
    """Groups the axes of a reduction by the dimension that the operation before it reduces."""
    axes: tuple[str, ...] = reduction.attributes["axes"]
    producer = reduction.operands[0].producer
    for operand in producer.operands if producer else ():
        split = [tuple(a for a in axes if a in dimension) for dimension in operand.axes]
        found = [group for group in split if group]
        if sum(map(len, found)) == len(axes):
            return found
    return [axes]


def _over(
    reduction: Operation,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    *,
    operands: list[Value],
    results: list[Value],
) -> Operation:
    group = math.prod(sizes.get(axis, 1) for axis in axes)
    return Operation(
        name="all_reduce",
        operands=operands,
        results=results,
        attributes={**reduction.attributes, "axes": axes, "group": group, "exact": True},
        source=reduction.source,
    )


def gather_what_is_narrow(graph: Graph, *, least_bytes: float = 0.0) -> None:
    """Rewrites convert(all_gather(x)) to all_gather(convert(x)), where fewer bytes are then sent.

    The same for all_reduce, all_to_all and collective_permute.

    Args:
      least_bytes: of an element of the types for which that is done.
    """
    returned = returned_values(graph)
    for block in blocks(graph):
        changes = Changes(block)
        for operation in reversed(list(block.operations)):
            if operation.name not in COLLECTIVES or len(operation.results) != 1:
                continue
            conversion = only_user(operation.results[0], returned)
            if conversion is None or not _narrows(conversion) or conversion not in changes:
                continue
            if element_bytes(conversion.results[0].dtype) < least_bytes:
                continue
            before = like(operation.operands[0], dtype=conversion.results[0].dtype)
            before.stated = operation.operands[0].stated
            first = Operation(
                name="convert",
                operands=list(operation.operands),
                results=[before],
                source=conversion.source,
            )
            set_operands(operation, [before])
            take_result(operation, conversion.results[0])
            conversion.results = []
            changes.drop(conversion)
            changes.put(operation, [first, operation])
        changes.apply()


def _narrows(operation: Operation) -> bool:
    if operation.name != "convert":
        return False
    before, after = operation.operands[0].dtype, operation.results[0].dtype
    is_float = "f" in before and "f" in after
    return is_float and element_bytes(after) < element_bytes(before)


def reassociate_reductions(graph: Graph, *, apart: Collection[str] = ()) -> None:
    """Rewrites all_reduce(x) + all_reduce(y) to all_reduce(x + y).

    Args:
      apart: operations whose results are reduced apart from those of others.
    """
    returned = returned_values(graph)
    sums: set[Value] = set()  # Of results of these operations alone.
    for block in blocks(graph):
        changes = Changes(block)
        for total in list(block.operations):
            pair = _summands(total, changes, returned)
            if pair is None:
                continue
            left, right = pair
            both = [left.operands[0], right.operands[0]]
            is_apart = [one in sums or _is_made_by(one, apart) for one in both]
            if is_apart[0] != is_apart[1]:
                continue
            result = total.results[0]
            partial = like(result)
            if all(is_apart):
                sums.add(partial)
            take_result(total, partial)
            reduction = Operation(
                name="all_reduce",
                operands=[partial],
                results=[],
                attributes=dict(left.attributes),
                source=left.source,
            )
            take_result(reduction, result)
            set_operands(total, both)
            changes.put(total, [total, reduction])
            changes.drop(left)
            changes.drop(right)
        changes.apply()


def _is_made_by(value: Value, names: Collection[str]) -> bool:
    return value.producer is not None and value.producer.name in names


def _summands(
    total: Operation, inside: Changes, returned: set[Value]
) -> tuple[Operation, Operation] | None:
    if total.name != "add" or len(total.operands) != 2:
        return None
    found = [value.producer for value in total.operands]
    left, right = found
    if left is None or right is None or left is right:
        return None
    for one in (left, right):
        is_sum = one.name == "all_reduce" and one.attributes.get("reducer", "add") == "add"
        if not is_sum or only_user(one.results[0], returned) is not total:
            return None
        if one not in inside:
            return None
    same = left.attributes["axes"] == right.attributes["axes"]
    return (left, right) if same else None


def scatter_reductions(
    graph: Graph, *, stays: Callable[[Operation, Sequence[str]], bool] = lambda *_: False
) -> None:
    """Rewrites all_slice(all_reduce(x)) to reduce_scatter(x), and an all_reduce over the remaining
    axes.

    Transposes and conversions in between then work on the part of one device.

    Args:
      stays: whether an all_reduce stays one; it is asked with the axes that would remain.
    """
    returned = returned_values(graph)
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        changes = Changes(block)
        for operation in list(block.operations):
            if operation.name != "all_reduce" or is_manual(operation):
                continue
            path = _path_to_slice(operation, returned)
            producer = operation.operands[0].producer
            if not path or path[-1] not in changes or (producer and producer.name == "scatter"):
                continue
            reduced, sliced = operation.attributes["axes"], path[-1].attributes["axes"]
            if sliced and set(sliced) <= set(reduced):
                rest = tuple(axis for axis in reduced if axis not in sliced)
                if not stays(operation, rest):
                    _scatter(changes, operation, path, rest, sizes)
        changes.apply()


def stays_on_tpu(reduction: Operation, rest: Sequence[str]) -> bool:
    """Whether libtpu (0.0.52) leaves a sum of which a part is taken as it is: sums of integers, and
    of rows that are looked up in parts of a table if they are sliced over some of its axes only."""
    summed = reduction.operands[0]
    if summed.dtype.startswith(("i", "u")):
        return True
    return bool(rest) and _is_made_by(summed, ("gather",))


def _path_to_slice(reduction: Operation, returned: set[Value]) -> list[Operation]:
    """Lists the operations from a reduction to the slice that alone needs it, with the slice."""
    path: list[Operation] = []
    value = reduction.results[0]
    while (user := only_user(value, returned)) is not None:
        path.append(user)
        if user.name == "all_slice":
            return path
        if user.name not in ("transpose", "convert", "copy"):
            return []
        value = user.results[0]
    return []


def _scatter(
    changes: Changes,
    reduction: Operation,
    path: list[Operation],
    rest: tuple[str, ...],
    sizes: dict[str, int],
) -> None:
    per_dimension: tuple[tuple[str, ...], ...] = path[-1].attributes[_BY_DIM]
    for operation in reversed(path[:-1]):
        _split_further(operation.results[0], per_dimension)
        if operation.name == "transpose":
            permutation: tuple[int, ...] = operation.attributes["perm"]
            before: list[tuple[str, ...]] = [()] * len(permutation)
            for after, source in enumerate(permutation):
                before[source] = per_dimension[after]
            per_dimension = tuple(before)
    result = reduction.results[0]
    _split_further(result, per_dimension)
    part = like(result) if rest else result
    scattered = Operation(
        name="reduce_scatter",
        operands=list(reduction.operands),
        results=[],
        attributes={**reduction.attributes, **path[-1].attributes, _BY_DIM: per_dimension},
        source=reduction.source,
    )
    take_result(scattered, part)
    set_operands(reduction, ())
    made = [scattered]
    if rest:
        last = _over(reduction, rest, sizes, operands=[part], results=[])
        take_result(last, result)
        made.append(last)
    changes.put(reduction, made)
    end = path[-1].results[0]
    path[-1].results = []
    before_slice = path[-1].operands[0]
    changes.drop(path[-1])
    assert before_slice.producer is not None
    take_result(before_slice.producer, end)


def _split_further(value: Value, per_dimension: tuple[tuple[str, ...], ...]) -> None:
    value.axes = tuple(
        (*present, *more) for present, more in zip(value.axes, per_dimension, strict=True)
    )


def hoist_gathers(graph: Graph) -> None:
    """Moves all_gather(x) out of a loop that does not change x: to a place in front of the loop."""
    for block in blocks(graph):
        for loop in [operation for operation in block.operations if operation.name == "while"]:
            body = loop.bodies[0]
            for number, argument in enumerate(list(body.arguments)):
                if body.returned[number] is argument:
                    _hoist_gathers(graph, block, loop, number)


def _hoist_gathers(graph: Graph, block: Block, loop: Operation, number: int) -> None:
    body = loop.bodies[0]
    argument, start = body.arguments[number], loop.operands[number]
    for gather in [one for one in argument.users if one.name == "all_gather"]:
        if gather not in body.operations or is_manual(gather):
            continue
        if IN_CONDITION in gather.attributes:  # XLA takes nothing out of a condition.
            continue
        inside = gather.results[0]
        before, outer, carried = like(inside), like(inside), like(inside)
        made = Operation(
            name="all_gather",
            operands=[start],
            results=[before],
            attributes=dict(gather.attributes),
            source=nearby(gather),
        )
        block.operations.insert(block.operations.index(loop), made)
        body.arguments.append(carried)
        body.returned.append(carried)
        set_operands(loop, [*loop.operands, before])
        outer.producer = loop
        loop.results.append(outer)
        replace_value(graph, inside, carried)
        drop(body, {gather})


def nearby(operation: Operation) -> str:
    """Returns the source line of an operation, or of the first one that reads its results."""
    users = (user.source for result in operation.results for user in result.users)
    return operation.source or next(filter(None, users), "")


def hoist_conversions(graph: Graph) -> None:
    """Rewrites convert(slice(xs)) in a loop over a constant xs to a slice of one converted copy of
    xs."""
    for block in blocks(graph):
        copies: dict[tuple[Value, str], Value] = {}
        for loop in [operation for operation in block.operations if operation.name == "while"]:
            for number, argument in enumerate(list(loop.bodies[0].arguments)):
                body = loop.bodies[0]
                if body.returned[number] is argument:
                    _hoist(graph, block, loop, number, copies)


def _hoist(
    graph: Graph,
    block: Block,
    loop: Operation,
    number: int,
    copies: dict[tuple[Value, str], Value],
) -> None:
    body = loop.bodies[0]
    argument, start = body.arguments[number], loop.operands[number]
    paths = _converted_slices(argument)
    if not paths:
        return
    dtype = paths[0][-1].results[0].dtype
    if (start, dtype) not in copies:
        copies[start, dtype] = like(start, dtype=dtype)
        made = Operation(name="convert", operands=[start], results=[copies[start, dtype]])
        block.operations.insert(block.operations.index(loop), made)
    copy = copies[start, dtype]
    inner = like(argument, dtype=dtype)
    body.arguments.append(inner)
    body.returned.append(inner)
    set_operands(loop, [*loop.operands, copy])
    outer = like(copy)
    outer.producer = loop
    loop.results.append(outer)
    for path in paths:
        set_operands(path[0], [inner, *path[0].operands[1:]])
        for operation in path[:-1]:
            operation.results[0].dtype = dtype
        replace_value(graph, path[-1].results[0], path[-1].operands[0])
        drop(body, {path[-1]})


def _converted_slices(argument: Value) -> list[list[Operation]]:
    """Maps each slice of a loop's array to the conversion behind it; empty if any has none."""
    paths: list[list[Operation]] = []
    for user in argument.users:
        path = [user]
        if user.name != "dynamic_slice" or user.operands[0] is not argument:
            return []
        while len(path[-1].results[0].users) == 1:
            path.append(path[-1].results[0].users[0])
            if path[-1].name not in _MOVES:
                break
        if not _narrows(path[-1]):
            return []
        paths.append(path)
    kinds: Iterable[str] = {path[-1].results[0].dtype for path in paths}
    return paths if len(set(kinds)) == 1 else []
