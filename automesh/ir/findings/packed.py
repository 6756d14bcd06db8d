"""The rule about arrays that are split over a dimension in which several things are packed."""

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
_CUTS = frozenset(("slice", "pad"))


def slice_across_parts(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds slices along a split dimension whose rows lie on other devices, such as queries, keys
    and values that one product makes side by side; and the pads in the gradients of such slices.

    The bytes are what one device sends for all slices at one line, those of the backward pass
    included. Halos, such as the one row that `x[1:]` needs, are left out, and so are arrays of
    which the program takes one part alone.
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
        yield Finding(
            rule=SLICE_ACROSS_PARTS,
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
)
