"""Rules about what tracing has put into the program: constants and unrolled layers."""

from __future__ import annotations

from collections.abc import Iterator

from automesh.cost.terms import Finding, Monomial, value_of
from automesh.ir.findings.nouns import LEAST_BYTES, OperationSite, PartitionedProgram, words
from automesh.ir.findings.rule import (
    OperationCheck,
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    bytes_of,
)
from automesh.ir.graph import Block, Operation
from automesh.ir.op_kinds import PRODUCTS
from automesh.ir.passes.collectives import IS_COMPUTED
from automesh.ir.terms.collectives import nearby_source

BAKED_CONSTANT = "baked-constant"
UNROLLED_LAYERS = "unrolled-layers"
# How often a line's product must be in a block before a loop would save compile time.
_LEAST_COPIES = 12
_Kind = tuple[str, tuple[tuple[int, ...], ...], str]


def baked_constant(program: PartitionedProgram, seen: OperationSite) -> Iterator[Finding]:
    """Finds arrays of the script that tracing has written into the program."""
    del program
    operation = seen.operation
    if operation.name != "constant" or operation.attributes.get("splat") is not None:
        return
    value = operation.results[0]
    if value.global_bytes < LEAST_BYTES or operation.attributes.get(IS_COMPUTED):
        return
    user = next(iter(value.users), None)
    yield Finding(
        rule=BAKED_CONSTANT,
        array=words(value),
        bytes=(value.bytes,),
        source=(nearby_source(user) if user is not None else "") or operation.source,
    )


def _baked_constant_words(finding: Finding, sizes: Sizes) -> str:
    return (
        f"{array_of(finding)} is written into the program as a constant: "
        f"{bytes_of(finding, sizes)} on every device, which every compile and every cache entry "
        "carries along"
    )


def unrolled_layers(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds the product that a Python loop has put into the program most often."""
    copies: dict[_Kind, list[Operation]] = {}
    for block in _blocks(program.graph.top):
        inside: dict[_Kind, list[Operation]] = {}
        for operation in block.operations:
            if operation.name in PRODUCTS and operation.source:
                inside.setdefault(_kind(operation), []).append(operation)
        for kind, found in inside.items():
            if len(found) > len(copies.get(kind, ())):
                copies[kind] = found
    most = max(copies.values(), key=len, default=[])
    if len(most) >= _LEAST_COPIES:
        yield Finding(
            rule=UNROLLED_LAYERS,
            array=words(most[0].results[0]),
            bytes=(),
            count=(Monomial(coefficient=float(len(most))),),
            source=most[0].source,
        )


def _unrolled_layers_words(finding: Finding, sizes: Sizes) -> str:
    times = round(value_of(finding.count, sizes))
    return (
        f"a Python loop has put the product at this line, {array_of(finding)}, into the program "
        f"{times} times, and the compiler optimizes each copy by itself"
    )


def _kind(operation: Operation) -> _Kind:
    contracted = str(
        [operation.attributes.get(name) for name in ("lhs_contracting", "rhs_contracting")]
    )
    return operation.source, tuple(one.shape for one in operation.operands), contracted


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for operation in block.operations:
        for body in operation.bodies:
            yield from _blocks(body)


RULES: tuple[Rule, ...] = (
    Rule(
        name=BAKED_CONSTANT,
        check=OperationCheck(baked_constant),
        title="baked constant",
        what=_baked_constant_words,
        why="an array that the step takes from around it, and not from its arguments, is traced as "
        "a constant, which no mesh splits",
        cure=advice("hand it to the step as an argument, with a sharding"),
    ),
    Rule(
        name=UNROLLED_LAYERS,
        check=WholeProgramCheck(unrolled_layers),
        title="unrolled layers",
        what=_unrolled_layers_words,
        why="jax traces a Python loop into as many copies as it has turns, and the time and the "
        "memory of a compile grow with them",
        cure=advice("stack the parameters and loop with `jax.lax.scan`"),
        is_always_shown=True,
    ),
)
