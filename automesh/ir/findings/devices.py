"""Rules about work on single devices, or repeated on all of them.

They find calls of Python on the host, transfers from its memory, random bits, and work that depends
on the device's place in the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from automesh.cost.terms import Finding, value_of
from automesh.ir.findings.nouns import LEAST_BYTES, OperationSite, PartitionedProgram, words
from automesh.ir.findings.rule import (
    OperationCheck,
    Rule,
    Sizes,
    advice,
    array_of,
    axes_of,
    bytes_of,
    times_of,
)
from automesh.ir.graph import Block, Operation, Value, total_bytes
from automesh.ir.op_kinds import PRODUCTS
from automesh.ir.passes.offload import is_move, is_to_host
from automesh.ir.terms.collectives import nearby_source

HOST_CALLBACK = "host-callback"
HOST_TRANSFER = "host-transfer"
WHOLE_RANDOM_BITS = "whole-random-bits"
UNEVEN_WORK = "uneven-work"
# `xla_ffi_python_cpu_callback` and similar calls, and the stand-in for absent devices.
_CALLBACK = "_callback"
_PLACES = frozenset(("partition_id", "replica_id"))
_FARTHEST = 512


def host_callback(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds calls of Python inside the step."""
    operation = seen.operation
    if not calls_python(operation):
        return
    moved = [*operation.operands, *operation.results]
    if not seen.loops and sum(one.global_bytes for one in moved) < LEAST_BYTES:
        return
    held = {axis for one in operation.operands for axis in _gathered_over(program, one)}
    yield Finding(
        rule=HOST_CALLBACK,
        array=words(max(moved, key=lambda one: one.global_bytes)) if moved else "a call",
        bytes=total_bytes(moved),
        axes=tuple(axis for axis, _ in program.graph.mesh if axis in held),
        count=seen.count,
        source=operation.source or nearby_source(operation),
        detail="loop" if seen.loops else "",
    )


def _host_callback_words(finding: Finding, sizes: Sizes) -> str:
    gathered = f", gathered over {axes_of(finding)} first" if finding.axes else ""
    return (
        f"the step calls Python on the host{times_of(finding, sizes)}: {bytes_of(finding, sizes)} "
        f"go there and back each time, {array_of(finding)} and the like{gathered}, and the devices "
        "wait"
    )


def calls_python(operation: Operation) -> bool:
    """Whether an operation calls Python on the host."""
    target = str(operation.attributes.get("target", ""))
    return operation.name == "custom_call" and target.endswith(_CALLBACK)


def host_transfer(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds arrays that a loop fetches whole from the memory of the host in every iteration.

    Layers of a stack that lies there, and activations that were moved there, are fetched in parts:
    that is what the memory of the host is for.
    """
    operation = seen.operation
    if not is_move(operation) or is_to_host(operation) or not seen.loops:
        return
    fetched = operation.results[0]
    is_carried = program.loop_of(operation.operands[0]) is not None
    if not is_carried or fetched.global_bytes < LEAST_BYTES:
        return
    yield Finding(
        rule=HOST_TRANSFER,
        array=words(fetched),
        bytes=(fetched.bytes,),
        count=seen.count,
        source=operation.source or nearby_source(operation),
    )


def _host_transfer_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"the loop fetches {array_of(finding)} from the memory of the host"
        f"{times_of(finding, sizes)}: {bytes_of(finding, sizes)} on a device each time"
    )


def whole_random_bits(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds random bits of XLA's own generator, which every device generates in full."""
    operation = seen.operation
    if operation.name != "rng_bit_generator":
        return
    bits = operation.results[-1]
    axes = {axis for split in bits.axes for axis in split}
    if bits.global_bytes < LEAST_BYTES or not axes:
        return
    whole = Value(shape=bits.shape, dtype=bits.dtype, axes=((),) * len(bits.shape))
    yield Finding(
        rule=WHOLE_RANDOM_BITS,
        array=words(bits),
        bytes=(whole.bytes,),
        axes=tuple(axis for axis, _ in program.graph.mesh if axis in axes),
        count=seen.count,
        source=operation.source or nearby_source(operation),
    )


def _whole_random_bits_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"the random bits {array_of(finding)} are made whole on every device along "
        f"{axes_of(finding)}, {bytes_of(finding, sizes)}{times_of(finding, sizes)}, and each keeps "
        "its part"
    )


def uneven_work(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds branches with products that only devices at some places of the mesh take, and loops
    with products that run longer at some of them."""
    operation = seen.operation
    if operation.name not in ("case", "while") or not operation.results:
        return
    work = [_has_product(branch) for branch in operation.bodies]
    if operation.name == "while":
        is_uneven = any(work) and operation.attributes.get("trips_differ", False)
    else:
        # The graph leaves out branches without operations: a single branch is taken or not.
        is_uneven = any(work) and (len(work) == 1 or not all(work))
        is_uneven = is_uneven and _depends_on_place(program, operation.operands[0])
    if not is_uneven:
        return
    result = max(operation.results, key=lambda one: one.global_bytes)
    if result.global_bytes * value_of(seen.count, program.sizes) < LEAST_BYTES:
        return
    yield Finding(
        rule=UNEVEN_WORK,
        array=words(result),
        bytes=(result.bytes,),
        axes=_axes_around(seen, result),
        count=seen.count,
        source=operation.source or nearby_source(operation),
        detail=operation.name,
    )


def _uneven_work_words(finding: Finding, sizes: Sizes) -> str:
    over = f" along {axes_of(finding)}" if finding.axes else ""
    if finding.detail == "while":
        return (
            f"how often a loop with products runs depends on the device's place{over}: those that "
            f"run {array_of(finding)} less often wait for the others{times_of(finding, sizes)}"
        )
    return (
        f"a branch with products depends on the device's place{over}: some devices do its work for "
        f"{array_of(finding)}, and the others wait for them{times_of(finding, sizes)}"
    )


def _gathered_over(program: PartitionedProgram, value: Value) -> Sequence[str]:
    maker = program.maker(value)
    gathers = maker is not None and maker.name == "all_gather"
    return maker.attributes["axes"] if gathers and maker is not None else ()


def _has_product(block: Block) -> bool:
    return any(
        operation.name in PRODUCTS
        or operation.name == "custom_call"
        or any(_has_product(body) for body in operation.bodies)
        for operation in block.operations
    )


def _axes_around(seen: OperationSite, result: Value) -> tuple[str, ...]:
    """Returns the mesh axes of the manual region around a branch.

    Axes over which a loop around it sends come first.
    """
    for loop in reversed(seen.loops):
        for operation in loop.bodies[0].operations:
            if operation.name == "collective_permute":
                return tuple(operation.attributes["axes"])
    return result.manual


def _depends_on_place(program: PartitionedProgram, value: Value) -> bool:
    """Whether a value is computed from the device's number in the mesh."""
    waiting, seen = [value], {value}
    while waiting and len(seen) < _FARTHEST:
        one = waiting.pop()
        made = one.producer
        if made is None:
            before: list[Value] = []
            if (found := program.loop_of(one)) is not None:
                loop, number = found
                before = [loop.operands[number], loop.bodies[0].returned[number]]
        elif made.name in _PLACES:
            return True
        else:
            before = _sources_of(made, one)
        for each in before:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return False


def _sources_of(made: Operation, value: Value) -> list[Value]:
    if made.name == "while":
        number = made.results.index(value)
        return [made.operands[number], made.bodies[0].returned[number]]
    return [one for one in made.operands if not one.is_constant]


RULES: tuple[Rule, ...] = (
    Rule(
        name=HOST_CALLBACK,
        check=OperationCheck(host_callback),
        title="host callback",
        what=_host_callback_words,
        why="`jax.pure_callback`, `jax.debug.print` and their like are calls of the program in the "
        "middle of its work",
        cure=advice("do it behind the step, on what the step returns, or not in every step"),
        is_always_shown=True,
    ),
    Rule(
        name=HOST_TRANSFER,
        check=OperationCheck(host_transfer),
        title="host transfer in a loop",
        what=_host_transfer_words,
        why="the loop carries an array that lies in the memory of the host, so that each iteration "
        "begins with the copy of all of it over the bus between host and device",
        cure=advice("fetch it once in front of the loop, and move the result behind it"),
    ),
    Rule(
        name=WHOLE_RANDOM_BITS,
        check=OperationCheck(whole_random_bits),
        title="whole random bits",
        what=_whole_random_bits_words,
        why="the partitioner does not split XLA's own generator, which keys of `rbg` and "
        "`unsafe_rbg` use",
        cure=advice(
            "use keys of threefry, `jax.random.key(seed, impl='threefry2x32')`, or on TPU "
            "`--xla xla_tpu_spmd_rng_bit_generator_unsafe=true`: bits then differ by mesh"
        ),
    ),
    Rule(
        name=UNEVEN_WORK,
        check=OperationCheck(uneven_work),
        title="uneven work",
        what=_uneven_work_words,
        why="all devices meet at the next collective, so that the busiest one decides how long it "
        "takes: with a causal mask, the one with the last part of the sequence",
        cure=advice(
            "give each device an early and a late part of the sequence (zigzag), or every n-th row "
            "(striped)"
        ),
        is_always_shown=True,
    ),
)
