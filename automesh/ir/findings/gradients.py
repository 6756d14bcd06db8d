"""Rules about gradients: reduced in every microbatch, or kept whole where their state is split."""

from __future__ import annotations

from collections.abc import Iterator

from automesh.cost.terms import Cure, Finding, value_of
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
    advice,
    array_of,
    axes_of,
    bytes_of,
    parts,
    times_of,
)
from automesh.ir.graph import Operation, Value, multiplied
from automesh.ir.op_kinds import ELEMENTWISE, VIEWS
from automesh.ir.terms.collectives import nearby_source
from automesh.texts.terminal import clean
from automesh.units import format_bytes

GRADIENT_PER_MICROBATCH = "gradient-per-microbatch"
REPLICATED_GRADIENT = "replicated-gradient"
# Operations that are followed from a value on, at most.
_FARTHEST = 256


def gradient_per_microbatch(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds gradients that are reduced in every iteration, although a loop only adds them up.

    This only applies where the platform's compiler does not move the reduction behind the loop: see
    `ir.passes.sunk`.
    """
    operation = seen.operation
    if operation.name != "all_reduce" or not seen.loops:
        return
    if not operation.attributes["axes"]:
        return
    loop, reduced = seen.loops[-1], operation.results[0]
    if reduced.global_bytes < LEAST_BYTES or value_of(seen.count, program.sizes) < 2:
        return
    is_manual = bool(operation.attributes.get("manual"))
    # The pass moves the reductions of a `jax.shard_map`, too, if nothing else is done to them.
    is_left = not is_manual or program.platform == "cpu" or _is_scaled(reduced)
    total = _carried_sum(reduced, loop) if is_left else None
    if total is not None and program.like_state(total) is not None:
        yield Finding(
            rule=GRADIENT_PER_MICROBATCH,
            array=words(total),
            bytes=(reduced.bytes,),
            axes=operation.attributes["axes"],
            count=seen.count,
            source=nearby_source(operation),
        )


def _gradient_per_microbatch_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"the gradient {array_of(finding)} is reduced over {axes_of(finding)} in every microbatch: "
        f"{bytes_of(finding, sizes)}{times_of(finding, sizes)}, where once would do"
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


def _replicated_gradient_words(finding: Finding, sizes: Sizes) -> str:
    whole = value_of(finding.bytes, sizes)
    return (
        f"the gradient {array_of(finding)} is kept whole along {axes_of(finding)}: "
        f"{format_bytes(whole)} on every device, and "
        f"{format_bytes(whole / parts(finding.axes, sizes))} if it were split like "
        f"{clean(finding.detail)}"
    )


def _kept_whole(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds gradients that stay whole, in the loop that adds them up or by a constraint."""
    yield from replicated_gradient(program, seen)
    yield from whole_gradient(program, seen)


def whole_gradient(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds reduced gradients that are used whole before a part of them updates the state.

    A reduction that only the slice of it follows is a reduce-scatter.
    """
    operation = seen.operation
    if operation.name != "all_reduce" or operation.attributes.get("manual"):
        return
    reduced = operation.results[0]
    if reduced.is_constant or reduced.global_bytes < LEAST_BYTES:
        return
    over = set(operation.attributes["axes"])
    for held in _turned(reduced):
        like = next(
            (
                one
                for one in program.carried()
                if one[1].shape == held.shape and over & _every(one[1])
            ),
            None,
        )
        if like is None or _every(held) & over:
            continue
        cuts = [user for user in held.users if user.name == "all_slice"]
        is_used = any(user.name in ELEMENTWISE and user.name != "transpose" for user in held.users)
        if cuts and is_used and _becomes_state(held, program):
            argument, wanted = like
            missing = over & _every(wanted)
            yield Finding(
                rule=REPLICATED_GRADIENT,
                array=words(held),
                bytes=(held.bytes,),
                axes=tuple(axis for axis, _ in program.graph.mesh if axis in missing),
                count=seen.count,
                source=_line_that_keeps_whole(held, missing, program) or nearby_source(operation),
                detail=program.state.name(argument),
                cure=Cure(kind="constrain-carried", shape=held.shape, splits=(wanted.axes,)),
            )
            return


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


def _turned(value: Value) -> Iterator[Value]:
    """Lists a value with its views, transposes and conversions."""
    waiting = [value]
    for _ in range(_FARTHEST):
        if not waiting:
            return
        one = waiting.pop()
        yield one
        waiting += [
            user.results[0]
            for user in set(one.users)
            if user.name in VIEWS or user.name in ("transpose", "convert")
        ]


def _line_that_keeps_whole(held: Value, axes: set[str], program: PartitionedProgram) -> str:
    """Returns the line of a constraint that leaves an array whole along the axes."""
    return next(
        (
            one.source
            for one in program.state.constraints
            if one.shape == held.shape and not axes & {name for split in one.axes for name in split}
        ),
        "",
    )


def _is_scaled(reduced: Value) -> bool:
    """Whether arithmetic comes between a reduction and the sum of the loop, as in `pmean`."""
    return any(
        user.name in ELEMENTWISE and user.name not in ("add", "convert") for user in reduced.users
    )


def _is_only_added_to(gather: Operation) -> bool:
    """Whether a gathered array is only used element by element, and split again afterwards."""
    if not gathers(gather):
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


RULES: tuple[Rule, ...] = (
    Rule(
        name=GRADIENT_PER_MICROBATCH,
        check=OperationCheck(gradient_per_microbatch),
        title="gradient per microbatch",
        what=_gradient_per_microbatch_words,
        why="each microbatch ends with a gradient that is the same on all devices, and the "
        "compiler does not move the reduction behind the loop",
        cure=advice(
            "add up each device's own gradients in `jax.shard_map` and `psum` once behind the "
            "loop, or use fewer microbatches"
        ),
    ),
    Rule(
        name=REPLICATED_GRADIENT,
        check=OperationCheck(_kept_whole),
        title="replicated gradient",
        what=_replicated_gradient_words,
        why="what a loop carries keeps the split that it starts with, and what a constraint leaves "
        "whole stays whole: nothing says that the gradient is split like its parameter",
        cure=advice("constrain it like the parameter: `with_sharding_constraint`"),
    ),
)
