"""The rules about arrays that are split over a dimension which is taken apart: several things are
packed in it, or it is the counter of random bits."""

from __future__ import annotations

from collections.abc import Iterator

from automesh.cost.terms import Finding, Monomial, Sum
from automesh.ir.findings.nouns import LEAST_BYTES, PartitionedProgram, words
from automesh.ir.findings.rule import (
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    axes_of,
    bytes_of,
    times_of,
)
from automesh.ir.graph import Operation, Value, added
from automesh.ir.passes.halos import ROWS_OF
from automesh.ir.terms.collectives import nearby_source

SLICE_ACROSS_PARTS = "slice-across-parts"
MOVED_RANDOM_BITS = "moved-random-bits"
_CUTS = frozenset(("slice", "pad"))
# Operations between a counter and the first round of threefry that takes it.
_MOST_STEPS = 12


def slice_across_parts(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds arrays in which several things are packed and whose parts lie on other devices."""
    return (found for found in _taken_apart(program) if found.rule == SLICE_ACROSS_PARTS)


def moved_random_bits(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds random bits whose counter is taken apart: nothing of the user's is packed there."""
    return (found for found in _taken_apart(program) if found.rule == MOVED_RANDOM_BITS)


def _taken_apart(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds slices along a split dimension whose rows lie on other devices, such as queries, keys
    and values that one product makes side by side; and the pads in the gradients of such slices.

    The bytes are what one device sends for all slices at one line, those of the backward pass
    included. Halos, such as the one row that `x[1:]` needs, are left out, and so are arrays of
    which the program takes one part alone.

    Where jax makes random bits without `jax_threefry_partitionable`, it takes a counter apart into
    two halves, which is a finding of its own.
    """
    moved: dict[tuple[str, str, tuple[str, ...], Sum], tuple[Value, list[Monomial]]] = {}
    packed: set[tuple[str, str, tuple[str, ...], Sum]] = set()
    joining: set[str] = set()
    for seen in program.operations():
        operation = seen.operation
        if _joins(operation):
            joining.add(operation.source)
        whole = operation.attributes.get(ROWS_OF)
        if operation.name != "collective_permute" or not isinstance(whole, Value):
            continue
        if operation.attributes["of"] not in _CUTS or whole.global_bytes < LEAST_BYTES:
            continue
        source = operation.source or nearby_source(operation)
        key = (source, whole.dtype, operation.attributes["axes"], seen.count)
        first, sent = moved.setdefault(key, (whole, []))
        sent.append(operation.operands[0].bytes)
        is_slice = operation.attributes["of"] == "slice"
        if is_slice and source not in joining and _is_taken_apart(whole):
            packed.add(key)
        if whole.global_bytes > first.global_bytes:
            moved[key] = (whole, sent)
    for key, (whole, sent) in moved.items():
        source, _, axes, count = key
        if key not in packed:
            continue
        is_counter = _is_counter(whole)
        if is_counter and not _feeds_random_bits(whole):
            continue  # Numbers in a row, of which every device can make its own part.
        yield Finding(
            rule=MOVED_RANDOM_BITS if is_counter else SLICE_ACROSS_PARTS,
            array=words(whole),
            bytes=added(*sent),
            axes=axes,
            count=count,
            source=source,
        )


def _joins(operation: Operation) -> bool:
    """Whether an operation of the script puts arrays end to end. Slices that come after it at the
    same line are its gradient, of parts that were never packed."""
    return operation.name == "concatenate" and not any(
        one.producer is not None and one.producer.name == "collective_permute"
        for one in operation.operands
    )


def _is_taken_apart(whole: Value) -> bool:
    """Whether several slices take all of an array, each another part of one dimension."""
    rows = whole.stated or whole.shape
    slices = {
        (tuple(user.attributes["start"]), tuple(user.attributes["limit"]))
        for user in whole.users
        if user.name == "slice" and user.attributes
    }
    cut = {
        d
        for start, limit in slices
        for d, (first, stop, full) in enumerate(zip(start, limit, rows, strict=True))
        if stop - first != full
    }
    if len(cut) != 1:
        return False
    (d,) = cut
    parts = sorted((start[d], limit[d]) for start, limit in slices)
    firsts, stops = [first for first, _ in parts], [stop for _, stop in parts]
    return [*firsts, rows[d]] == [0, *stops]


def _is_counter(whole: Value) -> bool:
    """Whether an array holds numbers in a row, whatever its shape and type."""
    value = whole
    while value.producer is not None and value.producer.name in ("reshape", "convert"):
        value = value.producer.operands[0]
    return value.producer is not None and value.producer.name == "iota"


def _feeds_random_bits(counter: Value) -> bool:
    """Whether the halves of a counter are mixed as threefry does it, by rotation and exclusive or,
    maybe in a loop over its rounds."""
    seen: set[str] = set()
    values = [counter]
    for _ in range(_MOST_STEPS):
        users = {id(user): user for value in values for user in value.users}.values()
        for user in users:
            seen.add(user.name)
            seen.update(inner.name for body in user.bodies for inner in body.operations)
        values = list({id(one): one for user in users for one in user.results}.values())
    return {"xor", "shift_left"} <= seen


def _moved_random_bits_words(finding: Finding, sizes: Sizes) -> str:
    cut = "split" if len(finding.axes) > 1 else "splits"
    return (
        f"{axes_of(finding)} {cut} the random bits that this line draws, and each device sends "
        f"{bytes_of(finding, sizes)} of their counter {array_of(finding)} to "
        f"others{times_of(finding, sizes)}"
    )


def _slice_across_parts_words(finding: Finding, sizes: Sizes) -> str:
    cut = "split" if len(finding.axes) > 1 else "splits"
    return (
        f"{axes_of(finding)} {cut} {array_of(finding)} over the dimension that this line takes "
        f"apart: each device sends {bytes_of(finding, sizes)} of it to "
        f"others{times_of(finding, sizes)}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name=SLICE_ACROSS_PARTS,
        check=WholeProgramCheck(slice_across_parts),
        title="slice across parts",
        what=_slice_across_parts_words,
        why="a slice is split as the array was, so that most of its rows lie on other devices: "
        "queries, keys and values, or gate and up, side by side in one dimension",
        cure=advice(
            "give what is packed a dimension of its own, which no axis splits, in the weight and "
            "in what comes out of it: `reshape(..., 3, heads, size)` and index it, or several "
            "weights"
        ),
    ),
    Rule(
        name=MOVED_RANDOM_BITS,
        check=WholeProgramCheck(moved_random_bits),
        title="moved random bits",
        what=_moved_random_bits_words,
        why="with `jax_threefry_partitionable` off, jax takes one counter of all bits apart into "
        "halves, so that the bits of a device come from counters of others",
        cure=advice(
            "`jax.config.update('jax_threefry_partitionable', True)`, jax's own setting since "
            "0.5: every device then counts for itself; the random numbers become other ones"
        ),
    ),
)
