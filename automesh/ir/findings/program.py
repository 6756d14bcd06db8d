"""Rules about operations, applied after the rewrites of a platform's compiler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from automesh.cost.terms import Cure, Finding, Monomial, value_of
from automesh.ir.findings.devices import calls_python, host_callback, uneven_work, whole_random_bits
from automesh.ir.findings.nouns import LEAST_BYTES, OperationSite, PartitionedProgram, words
from automesh.ir.findings.packed import slice_across_parts
from automesh.ir.findings.precision import wide_products, wide_reductions
from automesh.ir.findings.state import parts
from automesh.ir.findings.tiles import parts_below_tile
from automesh.ir.findings.traced import baked_constant, unrolled_layers
from automesh.ir.graph import Operation, Value, added, element_bytes, multiplied, total_bytes
from automesh.ir.op_kinds import ELEMENTWISE, VIEWS
from automesh.ir.terms.collectives import nearby_source

FULL_REMATERIALIZATION = "full-rematerialization"
LAYER_SPLIT_STACK = "layer-split-stack"
MICROBATCH_RESHAPE = "microbatch-reshape"
UNDIVIDED_OPERATION = "undivided-operation"
GRADIENT_PER_MICROBATCH = "gradient-per-microbatch"
REPLICATED_GRADIENT = "replicated-gradient"
PADDING_WASTE = "padding-waste"
_MOVES = frozenset(("all_gather", "all_to_all", "collective_permute"))
# Operations that need a whole dimension: a split operand is gathered, or moved twice.
_ALONG = frozenset(
    ("sort", "fft", "reduce_window", "top_k", "cholesky", "triangular_solve", "custom_call")
)
_PRODUCTS = frozenset(("dot_general", "convolution", "ragged_dot"))
_LEAST_WASTE = 0.1
_FARTHEST = 256


def program_findings(program: PartitionedProgram) -> Iterator[Finding]:
    """Applies all rules to a program after the rewrites of a platform's compiler."""
    for seen in program.operations():
        for rule in RULES:
            yield from rule(program, seen)
    for of_all in RULES_OF_ALL:
        yield from of_all(program)


def full_rematerialization(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds arrays that are gathered whole, only to be split in another way."""
    operation = seen.operation
    if not _gathers(operation):
        return
    whole = operation.results[0]
    users = set(whole.users)
    if not users or any(user.name != "all_slice" for user in users):
        return
    if _microbatches(program, seen) is None:
        after = next(iter(users)).results[0].axes
        source = nearby_source(operation)
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


def microbatch_reshape(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds batches that are reshaped so that microbatches are split instead of examples."""
    operation = seen.operation
    if operation.name not in _MOVES or operation.attributes.get("manual"):
        return
    reshape = _microbatches(program, seen)
    moved = operation.results[0]
    if reshape is None or moved.is_constant:
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
        cure=Cure(kind="interleave", shape=reshape.operands[0].shape, source=reshape.source),
    )


def undivided_operation(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds operations that need a split dimension whole.

    Every device then does all of the operation, or the array is sent before and after it.
    """
    operation = seen.operation
    if operation.name not in _ALONG and operation.name not in _PRODUCTS:
        return
    if calls_python(operation):
        return  # A rule of its own.
    remaining = {axis for one in operation.results for axes in one.axes for axis in axes}
    moved: list[Value] = []
    axes: set[str] = set()
    gathers = False
    for operand in operation.operands:
        maker = program.maker(operand)
        if maker is None or maker.name not in _MOVES or maker.attributes.get("manual"):
            continue
        over = set(maker.attributes["axes"])
        if maker.name == "all_gather" and not over & remaining:
            gathers = True
        elif maker.name == "all_gather" or operation.name not in _ALONG:
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
            detail=f"{_said(operation)}, {'gathered' if gathers else 'moved'}",
        )


def gradient_per_microbatch(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds gradients that are reduced in every iteration, although a loop only adds them up.

    This only applies where the platform's compiler does not move the reduction behind the loop: see
    `ir.passes.sunk`.
    """
    operation = seen.operation
    if operation.name != "all_reduce" or operation.attributes.get("manual") or not seen.loops:
        return
    if not operation.attributes["axes"]:
        return
    loop, reduced = seen.loops[-1], operation.results[0]
    if reduced.global_bytes < LEAST_BYTES or value_of(seen.count, program.sizes) < 2:
        return
    total = _carried_sum(reduced, loop)
    if total is not None and program.like_state(total) is not None:
        yield Finding(
            rule=GRADIENT_PER_MICROBATCH,
            array=words(total),
            bytes=(reduced.bytes,),
            axes=operation.attributes["axes"],
            count=seen.count,
            source=nearby_source(operation),
        )


def replicated_gradient(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds sums of a loop for the state that are whole along axes which split the state.

    The loop carries the whole array, or gathers it in every iteration, adds to it and splits it
    again.
    """
    loop = seen.operation
    if loop.name != "while":
        return
    body = loop.bodies[0]
    for number, value in enumerate(body.arguments):
        if body.returned[number] is value or value.global_bytes < LEAST_BYTES:
            continue
        held, source = value, loop.source or nearby_source(loop)
        count = seen.count
        gathered = next((user for user in value.users if _is_only_added_to(user)), None)
        if gathered is not None:
            held = gathered.results[0]
            source = _source_of_cut(held) or source
            count = count if loop.times is None else multiplied(count, loop.times)
        like = next(
            (
                (argument, one)
                for argument, one in program.carried()
                if one.shape == held.shape and _every(held) < _every(one)
            ),
            None,
        )
        if like is None or not _becomes_state(loop.results[number], program):
            continue
        argument, wanted = like
        missing = _every(wanted) - _every(held)
        yield Finding(
            rule=REPLICATED_GRADIENT,
            array=words(held),
            bytes=(held.bytes,),
            axes=tuple(axis for axis, _ in program.graph.mesh if axis in missing),
            count=count,
            source=source,
            detail=program.state.name(argument),
            cure=Cure(kind="constrain-carried", shape=held.shape, splits=(wanted.axes,)),
        )


def padding_waste(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds the largest array of each dimension that axes do not divide evenly."""
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
                if 1 < size != padded and wasted > found.get(key, (0.0,))[0]:
                    source = nearby_source(seen.operation)
                    found[key] = wasted, value, source
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


RULES: tuple[Callable[[PartitionedProgram, OperationSite], Iterable[Finding]], ...] = (
    full_rematerialization,
    layer_split_stack,
    microbatch_reshape,
    undivided_operation,
    gradient_per_microbatch,
    replicated_gradient,
    baked_constant,
    host_callback,
    whole_random_bits,
    uneven_work,
)
RULES_OF_ALL: tuple[Callable[[PartitionedProgram], Iterable[Finding]], ...] = (
    padding_waste,
    parts_below_tile,
    wide_products,
    wide_reductions,
    unrolled_layers,
    slice_across_parts,
)


def _gathers(operation: Operation) -> bool:
    """Whether the partitioner gathers an array that is large enough to be reported."""
    if operation.name != "all_gather" or operation.attributes.get("manual"):
        return False
    whole = operation.results[0]
    return not whole.is_constant and whole.global_bytes >= LEAST_BYTES


def _is_read_by_elements(operation: Operation) -> bool:
    """Whether loops read single elements of a gathered array along the gathered dimension."""
    if not _gathers(operation):
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
    if not seen.loops and not _is_for_loop(operation.results[0]):
        return None
    made = program.maker(operation.operands[0])
    if made is not None and made.name == "convert":  # moved in a narrower type
        made = program.maker(made.operands[0])
    if made is None or made.name != "reshape":
        return None
    before, after = made.operands[0], made.results[0]
    if len(after.shape) != len(before.shape) + 1:
        return None
    for d, axes in enumerate(before.axes):
        # The sizes of the new dimensions may be those of a part; the sizes around them show the
        # position.
        around = (*before.shape[:d], *before.shape[d + 1 :])
        if (
            set(axes) & set(operation.attributes["axes"])
            and (*after.shape[:d], *after.shape[d + 2 :]) == around
        ):
            return made
    return None


def _is_for_loop(value: Value) -> bool:
    """Whether a loop reads a value, or a part or view of it."""
    for _ in range(_FARTHEST):
        users = set(value.users)
        if any(user.name == "while" for user in users):
            return True
        if len(users) != 1:
            return False
        user = users.pop()
        if user.name not in VIEWS and user.name not in ELEMENTWISE and user.name != "all_slice":
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


def _carried_sum(reduced: Value, loop: Operation) -> Value | None:
    """Returns the carried value to which a value is added, if nothing else reads it."""
    body = loop.bodies[0]
    value = reduced
    for _ in range(_FARTHEST):
        users = set(value.users)
        if len(users) != 1:
            return None
        user = users.pop()
        if user.name == "add":
            others = [one for one in user.operands if one is not value]
            for number, argument in enumerate(body.arguments):
                if argument in others and body.returned[number] is user.results[0]:
                    return argument
            return None
        if user.name not in ELEMENTWISE and user.name not in VIEWS:
            return None
        value = user.results[0]
    return None


def _is_only_added_to(gather: Operation) -> bool:
    """Whether a gathered array is only used element by element, and split again afterwards."""
    if not _gathers(gather):
        return False
    users = set(gather.results[0].users)
    return bool(users) and all(
        user.name in ELEMENTWISE
        and user.results[0].users
        and all(after.name == "all_slice" for after in user.results[0].users)
        for user in users
    )


def _source_of_cut(gathered: Value) -> str:
    return next(
        (
            after.source
            for user in gathered.users
            for after in user.results[0].users
            if after.source
        ),
        "",
    )


def _becomes_state(value: Value, program: PartitionedProgram) -> bool:
    """Whether a value becomes state through elementwise operations and views alone."""
    results = [result for _, result in program.state.pairs]
    returned = program.graph.top.returned
    wanted = {returned[result] for result in results if result < len(returned)}
    waiting, seen = [value], {value}
    while waiting and len(seen) < _FARTHEST:
        one = waiting.pop()
        if one in wanted:
            return True
        for user in one.users:
            if user.name in ELEMENTWISE or user.name in VIEWS or user.name == "all_slice":
                for result in user.results:
                    if result not in seen:
                        seen.add(result)
                        waiting.append(result)
    return False


def _every(value: Value) -> frozenset[str]:
    return frozenset(axis for axes in value.axes for axis in axes)


def _said(operation: Operation) -> str:
    if operation.name == "custom_call":
        return f"custom call {operation.attributes.get('target', '')}".strip()
    return operation.name
