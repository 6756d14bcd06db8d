"""Rules about operations, applied after the rewrites of a platform's compiler."""

from __future__ import annotations

import math
from collections.abc import Iterator

from automesh.cost.terms import Cure, Finding, Monomial
from automesh.ir.findings.devices import calls_python
from automesh.ir.findings.nouns import (
    LEAST_BYTES,
    OperationSite,
    PartitionedProgram,
    gathers,
    words,
)
from automesh.ir.findings.rule import (
    OperationCheck,
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    axes_of,
    bytes_of,
    parts,
    times_of,
)
from automesh.ir.graph import Operation, Value, added, element_bytes, total_bytes
from automesh.ir.op_kinds import ELEMENTWISE, VIEWS
from automesh.ir.terms.collectives import nearby_source
from automesh.texts.terminal import clean

FULL_REMATERIALIZATION = "full-rematerialization"
LAYER_SPLIT_STACK = "layer-split-stack"
MICROBATCH_RESHAPE = "microbatch-reshape"
UNDIVIDED_OPERATION = "undivided-operation"
PADDING_WASTE = "padding-waste"
_MOVES = frozenset(("all_gather", "all_to_all", "collective_permute"))
# Operations that need a whole dimension: a split operand is gathered, or moved twice.
_ALONG = frozenset(
    ("sort", "fft", "reduce_window", "top_k", "cholesky", "triangular_solve", "custom_call")
)
# Of these, those whose parts each read all rows where the rest of the result stays split.
_OF_ALL_ROWS = frozenset(("fft", "reduce_window"))
# These take or replace rows: the array is gathered unless they are single ones.
_OF_ROWS = frozenset(("gather", "scatter", "dynamic_update_slice"))
_PRODUCTS = frozenset(("dot_general", "convolution", "ragged_dot"))
_LEAST_WASTE = 0.1
_FARTHEST = 256
# `Finding.detail` of a batch of which a loop takes slices.
_SLICES = "slices"


def full_rematerialization(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds arrays that are gathered whole, only to be split in another way."""
    operation = seen.operation
    if not gathers(operation):
        return
    whole = operation.results[0]
    users = set(whole.users)
    if not users or any(user.name != "all_slice" for user in users):
        return
    if _microbatches(program, seen) is None:
        after = next(iter(users)).results[0].axes
        source = _line_that_asks(whole, after, program, nearby_source(operation))
        yield Finding(
            rule=FULL_REMATERIALIZATION,
            array=words(whole),
            bytes=(whole.bytes,),
            axes=operation.attributes["axes"],
            count=seen.count,
            source=source,
            cure=Cure(
                kind="hops",
                shape=whole.shape,
                splits=(operation.operands[0].axes, after),
                source=source,
            ),
        )


def _line_that_asks(
    whole: Value, after: tuple[tuple[str, ...], ...], program: PartitionedProgram, line: str
) -> str:
    """Returns the line of the constraint that asks for a split.

    Elementwise operations in front of it are split like their result, so that the array moves
    before the first of them: there, the partitioner's operation has the line of a loop, or another.
    """
    alike = [one for one in program.state.constraints if one.shape == whole.shape]
    asking = {one.source for one in alike if one.axes == after}
    is_stated = any(one.source == line for one in alike)
    return line if is_stated or len(asking) != 1 else asking.pop()


def _full_rematerialization_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"to split {array_of(finding)} otherwise XLA gathers all of it over {axes_of(finding)}, "
        f"{bytes_of(finding, sizes)} on every device{times_of(finding, sizes)}, and cuts it again"
    )


def layer_split_stack(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds stacks that are split over the dimension along which a loop reads single elements."""
    operation = seen.operation
    if not _is_read_by_elements(operation) or _microbatches(program, seen) is not None:
        return
    whole = operation.results[0]
    argument = program.argument_of(operation.operands[0])
    yield Finding(
        rule=LAYER_SPLIT_STACK,
        array=words(whole),
        bytes=(whole.bytes,),
        axes=operation.attributes["axes"],
        count=seen.count,
        source=nearby_source(operation),
        detail="" if argument is None else program.state.name(argument),
        cure=None if argument is None else _other_dimension(program, argument),
    )


def _layer_split_stack_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{axes_of(finding)} {'split' if len(finding.axes) > 1 else 'splits'} {array_of(finding)} "
        "over the dimension that a loop walks along, and the loop gathers all of it, "
        f"{bytes_of(finding, sizes)} on every device{times_of(finding, sizes)}"
    )


def microbatch_reshape(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds batches that are reshaped so that microbatches are split instead of examples."""
    operation = seen.operation
    if operation.name not in _MOVES or operation.attributes.get("manual"):
        return
    reshape = _microbatches(program, seen)
    moved = operation.results[0]
    if moved.is_constant:
        return
    if reshape is None:
        yield from _sliced_microbatches(program, seen)
        return
    # As large as the batch is, in whatever type it is moved.
    if math.prod(moved.shape) * element_bytes(reshape.results[0].dtype) < LEAST_BYTES:
        return
    yield Finding(
        rule=MICROBATCH_RESHAPE,
        array=words(reshape.operands[0]),
        bytes=(moved.bytes,),
        axes=operation.attributes["axes"],
        count=seen.count,
        source=reshape.source or nearby_source(operation),
        cure=Cure(
            kind="interleave",
            shape=reshape.operands[0].shape,
            splits=(reshape.operands[0].axes,),
            source=reshape.source,
        ),
    )


def _sliced_microbatches(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds batches of which a loop takes slices of several rows, which lie on some devices."""
    operation = seen.operation
    before, moved = operation.operands[0], operation.results[0]
    axes = set(program.batch_axes()) & set(operation.attributes["axes"])
    is_in_loop = bool(seen.loops) or any(user.name == "while" for user in moved.users)
    if not is_in_loop or not axes or moved.global_bytes < LEAST_BYTES or program.is_state(before):
        return
    rows = [d for d in range(len(before.shape)) if axes & {*before.axes[d]} - {*moved.axes[d]}]
    readers = _slices_of(moved)
    if rows and any(
        1 < reader.attributes["sizes"][d] < before.shape[d] for reader in readers for d in rows
    ):
        yield Finding(
            rule=MICROBATCH_RESHAPE,
            array=words(before),
            bytes=(moved.bytes,),
            axes=operation.attributes["axes"],
            count=seen.count,
            source=readers[0].source or nearby_source(operation),
            detail=_SLICES,
        )


def _microbatch_reshape_words(finding: Finding, sizes: Sizes) -> str:
    sent = f"{bytes_of(finding, sizes)} on a device{times_of(finding, sizes)}"
    if finding.detail == _SLICES:
        return (
            f"the loop takes slices of several rows of {array_of(finding)}, which lie on some of "
            f"the devices along {axes_of(finding)}, and so sends the batch around: {sent}"
        )
    return (
        f"the reshape of {array_of(finding)} into microbatches lets {axes_of(finding)} split the "
        f"microbatches and not the examples, so that the loop over them sends the batch around: "
        f"{sent}"
    )


def undivided_operation(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds operations that need a split dimension whole.

    Every device then does all of the operation, or the array is sent before and after it.
    """
    operation = seen.operation
    if operation.name in _OF_ROWS:
        yield from _rows_of_gathered(program, seen)
    if operation.name not in _ALONG and operation.name not in _PRODUCTS:
        return
    if calls_python(operation):
        return  # A rule of its own.
    remaining = {axis for one in operation.results for axes in one.axes for axis in axes}
    moved: list[Value] = []
    axes: set[str] = set()
    how = "moved"
    for operand in operation.operands:
        maker = program.maker(operand)
        if maker is None or maker.name not in _MOVES or maker.attributes.get("manual"):
            continue
        over = set(maker.attributes["axes"])
        if maker.name == "all_gather" and not over & remaining:
            how = "gathered"
        elif maker.name == "all_gather" and operation.name in _OF_ALL_ROWS:
            how = "whole"
        elif maker.name == "all_gather" or operation.name not in _ALONG:
            continue
        if operation.name in _PRODUCTS and _is_asked_whole(program, maker):
            continue
        moved.append(maker.results[0])
        axes |= over
    held = {axis for one in operation.operands for part in one.axes for axis in part}
    if operation.name in _PRODUCTS and axes & held:
        return  # Each device adds up its part.
    if sum(value.global_bytes for value in moved) >= LEAST_BYTES:
        yield Finding(
            rule=UNDIVIDED_OPERATION,
            array=words(max(moved, key=lambda value: value.global_bytes)),
            bytes=total_bytes(moved),
            axes=tuple(axis for axis, _ in program.graph.mesh if axis in axes),
            count=seen.count,
            source=operation.source or nearby_source(operation),
            detail=f"{_said(operation)}, {how}",
        )
    elif operation.name in _ALONG and (cut := _cut_behind(operation)):
        whole = max(operation.operands, key=lambda value: value.global_bytes)
        if whole.global_bytes < LEAST_BYTES or cut & held:
            return
        yield Finding(
            rule=UNDIVIDED_OPERATION,
            array=words(whole),
            bytes=(whole.bytes,),
            axes=tuple(axis for axis, _ in program.graph.mesh if axis in cut),
            count=seen.count,
            source=operation.source or nearby_source(operation),
            detail=f"{_said(operation)}, repeated",
        )


def _is_asked_whole(program: PartitionedProgram, gather: Operation) -> bool:
    """Whether the script asks for an array inside the step to be whole along axes that split no
    rows of the batch, as for the keys and values of fewer heads than there are devices."""
    over, whole = set(gather.attributes["axes"]), gather.results[0]
    if over & set(program.batch_axes()) or program.is_state(gather.operands[0]):
        return False
    return any(
        one.shape == whole.shape and not over & {axis for axes in one.axes for axis in axes}
        for one in program.state.constraints
    )


def _rows_of_gathered(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds arrays inside the step that are gathered because some of their rows are replaced, or
    taken, at places that the program looks up."""
    operation = seen.operation
    whole = operation.operands[0]
    maker = whole.producer
    if maker is None or not gathers(maker):
        return
    # Parameters are gathered for many readers. Nothing else needs a whole buffer, such as a cache.
    is_argument = program.argument_of(maker.operands[0]) is not None
    if is_argument and operation.name != "dynamic_update_slice":
        return
    yield Finding(
        rule=UNDIVIDED_OPERATION,
        array=words(whole),
        bytes=(whole.bytes,),
        axes=maker.attributes["axes"],
        count=seen.count,
        source=operation.source or nearby_source(operation),
        detail=f"{operation.name}, whole",
    )


def _undivided_operation_words(finding: Finding, sizes: Sizes) -> str:
    operation, _, how = finding.detail.partition(", ")
    if how == "moved":
        return (
            f"{clean(operation)} works along a dimension of {array_of(finding)} that "
            f"{axes_of(finding)} split: {bytes_of(finding, sizes)} on a device are sent around for "
            f"it{times_of(finding, sizes)}"
        )
    if how == "whole":
        split = "split" if len(finding.axes) > 1 else "splits"
        does = "writes rows into" if operation == "dynamic_update_slice" else "reads all rows of"
        return (
            f"{clean(operation)} {does} {array_of(finding)}, which {axes_of(finding)} "
            f"{split}: gathered, {bytes_of(finding, sizes)} on every device"
            f"{times_of(finding, sizes)}"
        )
    is_gathered = "" if how == "repeated" else "gathered, "
    return (
        f"{axes_of(finding)} {_divide(finding)} {clean(operation)}: {array_of(finding)} is "
        f"{is_gathered}{bytes_of(finding, sizes)} on every device{times_of(finding, sizes)}, "
        "and all devices along them do the same work"
    )


def padding_waste(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds dimensions that axes do not divide evenly: the first large array that has them.

    Later ones get their split from it.
    """
    found: dict[tuple[int, tuple[str, ...]], tuple[float, Value, str]] = {}
    for seen in program.operations():
        for value in seen.operation.results:
            if not value.stated or value.is_constant:
                continue
            wasted = value.global_bytes - math.prod(value.stated) * element_bytes(value.dtype)
            if wasted < LEAST_BYTES or wasted < _LEAST_WASTE * value.global_bytes:
                continue
            for d, (size, padded) in enumerate(zip(value.stated, value.shape, strict=True)):
                key = (size, value.axes[d])
                if 1 < size != padded and key not in found:
                    source = _constraint_of(size, value.axes[d], program)
                    found[key] = wasted, value, source or nearby_source(seen.operation)
    sizes = program.sizes
    for (size, axes), (wasted, value, source) in found.items():
        share = wasted / value.global_bytes
        padded = -(-size // parts(axes, sizes)) * parts(axes, sizes)
        part = value.bytes
        yield Finding(
            rule=PADDING_WASTE,
            array=words(value),
            bytes=added(Monomial(coefficient=part.coefficient * share, powers=part.powers)),
            axes=axes,
            source=source,
            detail=f"{size} as {padded}",
        )


def _padding_waste_words(finding: Finding, sizes: Sizes) -> str:
    size, _, padded = finding.detail.partition(" as ")
    return (
        f"{axes_of(finding)} {_divide(finding)} the {size} of {array_of(finding)}: the compiler "
        f"pads it to {padded}, {bytes_of(finding, sizes)} of padding on a device in this array "
        "alone"
    )


def _constraint_of(size: int, axes: tuple[str, ...], program: PartitionedProgram) -> str:
    """Returns the line that asks for a split of a dimension; empty if none does."""
    return next(
        (
            one.source
            for one in program.state.constraints
            for length, split in zip(one.shape, one.axes, strict=True)
            if length == size and split == axes
        ),
        "",
    )


def _is_read_by_elements(operation: Operation) -> bool:
    """Whether loops read single elements of a gathered array along the gathered dimension."""
    if not gathers(operation):
        return False
    gathered = [d for d, axes in enumerate(operation.attributes["per_dimension"]) if axes]
    readers = _slices_of(operation.results[0])
    return bool(readers) and all(
        any(reader.attributes["sizes"][d] == 1 for d in gathered) for reader in readers
    )


def _slices_of(whole: Value) -> list[Operation]:
    """Lists the dynamic slices that read a gathered array, also in loops that carry it.

    Empty if any other operation reads it.
    """
    found: list[Operation] = []
    for user in set(whole.users):
        if user.name == "while":
            number = user.operands.index(whole)
            body = user.bodies[0]
            if body.returned[number] is not body.arguments[number]:
                return []
            inner = _slices_of(body.arguments[number])
            if not inner:
                return []
            found += inner
        elif user.name == "dynamic_slice" and user.operands[0] is whole:
            found.append(user)
        else:
            return []
    return found


def _microbatches(program: PartitionedProgram, seen: OperationSite) -> Operation | None:
    """Finds the reshape that splits a batch into microbatches, if a loop's array comes from one.

    It makes two dimensions of one, the first of which is the number of microbatches. Some of the
    axes that the array is moved over must split that dimension.
    """
    operation = seen.operation
    loop = _loop_for(operation.results[0]) or (seen.loops[-1] if seen.loops else None)
    if loop is None or _is_in_order(program, loop):
        return None
    batch = set(program.batch_axes())
    if batch and not batch & set(operation.attributes["axes"]):
        return None  # Another dimension, such as a sequence in chunks.
    made = program.maker(operation.operands[0])
    if made is not None and made.name == "convert":  # moved in a narrower type
        made = program.maker(made.operands[0])
    if made is None or made.name != "reshape":
        return None
    before, after = made.operands[0], made.results[0]
    if len(after.shape) != len(before.shape) + 1:
        return None
    if program.is_state(before):
        return None  # A stack of layers, of which a loop takes several at once.
    for d, axes in enumerate(before.axes):
        # The sizes of the new dimensions may be those of a part; the sizes around them show the
        # position.
        around = (*before.shape[:d], *before.shape[d + 1 :])
        if (
            set(axes) & set(operation.attributes["axes"])
            and after.shape[d : d + 2] != (1, before.shape[d])
            and (*after.shape[:d], *after.shape[d + 2 :]) == around
        ):
            return made
    return None


def _loop_for(value: Value) -> Operation | None:
    """Returns the loop that reads a value, or a part or view of it; None if no loop does."""
    for _ in range(_FARTHEST):
        users = set(value.users)
        for user in users:
            if user.name == "while":
                return user
        if len(users) != 1:
            return None
        user = users.pop()
        if user.name not in VIEWS and user.name not in ELEMENTWISE and user.name != "all_slice":
            return None
        value = user.results[0]
    return None


def _is_in_order(program: PartitionedProgram, loop: Operation) -> bool:
    """Whether a turn of a loop needs what the turns before it made, as a recurrence over the chunks
    of a sequence does. Sums, the state of the step, and results that are put side by side do not:
    these turns may take any rows."""
    body = loop.bodies[0]
    for before, given, after in zip(loop.operands, body.arguments, body.returned, strict=True):
        is_kept = after is given or not given.shape or not given.dtype.startswith(("f", "bf"))
        if not is_kept and not program.is_state(before) and not _is_added_to(given):
            return True
    return False


def _is_added_to(value: Value) -> bool:
    """Whether a loop only adds to a value that it carries, or writes elements of it."""
    for _ in range(_FARTHEST):
        users = set(value.users)
        if len(users) != 1:
            return not users
        user = users.pop()
        if user.name in ("add", "dynamic_update_slice"):
            return True
        if user.name not in VIEWS and user.name not in ("convert", "all_slice"):
            return False
        value = user.results[0]
    return False


def _other_dimension(program: PartitionedProgram, argument: int) -> Cure | None:
    """Makes the cure that splits the stack over its largest other dimension instead.

    All arrays of the state with the same shape and sharding get the same split.
    """
    arguments, sizes = program.graph.top.arguments, program.sizes
    stack = arguments[argument]
    axes = stack.axes[0]
    free = [
        d
        for d, size in enumerate(stack.shape)
        if d and not stack.axes[d] and size % parts(axes, sizes) == 0
    ]
    if not axes or not free:
        return None
    place = max(free, key=lambda d: stack.shape[d])
    after = tuple(
        () if d == 0 else axes if d == place else split for d, split in enumerate(stack.axes)
    )
    alike = [
        number
        for number, one in enumerate(arguments)
        if one.shape == stack.shape and one.axes == stack.axes
    ]
    results = dict(program.state.pairs)
    return Cure(
        kind="split-like",
        arguments=tuple(alike),
        results=tuple(results.get(number, -1) for number in alike),
        splits=(after,) * len(alike),
    )


def _cut_behind(operation: Operation) -> set[str]:
    """Returns the axes that split all that is kept of the results of an operation."""
    users = [user for result in operation.results for user in set(result.users)]
    if not users or any(user.name != "all_slice" for user in users):
        return set()
    return set[str].intersection(*(set(user.attributes["axes"]) for user in users))


def _said(operation: Operation) -> str:
    if operation.name == "custom_call":
        return f"custom call {operation.attributes.get('target', '')}".strip()
    return operation.name


def _divide(finding: Finding) -> str:
    return "do not divide" if len(finding.axes) > 1 else "does not divide"


RULES: tuple[Rule, ...] = (
    Rule(
        name=FULL_REMATERIALIZATION,
        check=OperationCheck(full_rematerialization),
        title="full rematerialization",
        what=_full_rematerialization_words,
        why="the partitioner knows no direct way between these two splits, so it gathers the whole "
        "array and keeps a part",
        cure=advice("constrain it in two steps that each move one dimension"),
    ),
    Rule(
        name=LAYER_SPLIT_STACK,
        check=OperationCheck(layer_split_stack),
        title="layer-split stack",
        what=_layer_split_stack_words,
        why="a loop takes one element of that dimension, such as a layer, at a time at a place "
        "that is known only when it runs, and that element lies on some of the devices alone",
        cure=advice("split another dimension of it"),
    ),
    Rule(
        name=MICROBATCH_RESHAPE,
        check=OperationCheck(microbatch_reshape),
        title="microbatch reshape",
        what=_microbatch_reshape_words,
        why="a reshape from (batch, ...) to (microbatches, examples, ...) keeps the devices in "
        "order, so that each of them holds some microbatches and not a part of every one",
        cure=advice(
            "reshape to (examples, microbatches, ...) and swap the first two dimensions: each "
            "device then cuts its own examples (other examples share a microbatch)"
        ),
    ),
    Rule(
        name=UNDIVIDED_OPERATION,
        check=OperationCheck(undivided_operation),
        title="undivided operation",
        what=_undivided_operation_words,
        why="the operation needs the dimension whole that the axes split, or no axis splits what "
        "else it works on",
        cure=advice(
            "let these axes split another dimension of it, as by `with_sharding_constraint`, or "
            "do it in `jax.shard_map` on each device's part"
        ),
    ),
    Rule(
        name=PADDING_WASTE,
        check=WholeProgramCheck(padding_waste),
        title="padding waste",
        what=_padding_waste_words,
        why="all devices hold and compute parts of the same size, the last ones filled up",
        cure=advice("choose a size that the axes divide, or let smaller axes split it"),
    ),
)
