"""Merges findings that have one cause: the same rule, line and mesh axes (no jax)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from automesh.cost.terms import Cure, Finding, value_of
from automesh.ir.findings.devices import UNEVEN_WORK
from automesh.ir.findings.gradients import GRADIENT_PER_MICROBATCH, REPLICATED_GRADIENT
from automesh.ir.findings.nouns import several
from automesh.ir.findings.packed import SLICE_ACROSS_PARTS
from automesh.ir.findings.precision import WIDE_REDUCTION
from automesh.ir.findings.program import (
    FULL_REMATERIALIZATION,
    LAYER_SPLIT_STACK,
    MICROBATCH_RESHAPE,
    UNDIVIDED_OPERATION,
)

# A line that maps over a tree of arrays, or whose backward pass does the same, has one finding.
_OF_A_LINE = frozenset(
    (
        FULL_REMATERIALIZATION,
        GRADIENT_PER_MICROBATCH,
        LAYER_SPLIT_STACK,
        MICROBATCH_RESHAPE,
        REPLICATED_GRADIENT,
        SLICE_ACROSS_PARTS,
        UNDIVIDED_OPERATION,
        UNEVEN_WORK,
        WIDE_REDUCTION,
    )
)


def merged(findings: Iterable[Finding], sizes: Mapping[str, int]) -> tuple[Finding, ...]:
    """Merges the findings of a rule that have the same line and axes into the costliest of them.

    Args:
      sizes: of the mesh axes.
    """
    groups: dict[object, list[Finding]] = {}
    for number, one in enumerate(findings):
        key = (one.rule, one.source, one.axes) if one.rule in _OF_A_LINE and one.source else number
        groups.setdefault(key, []).append(one)
    return tuple(
        found[0] if len(found) == 1 else _one_of(found, sizes) for found in groups.values()
    )


def _one_of(found: Sequence[Finding], sizes: Mapping[str, int]) -> Finding:
    """Adds the bytes of other arrays that are moved as often as the costliest one."""
    costliest = max(found, key=lambda one: value_of(one.bytes, sizes) * value_of(one.count, sizes))
    arrays = {one.array: one for one in found if one.array != costliest.array}
    added = [one for one in arrays.values() if one.count == costliest.count]
    together = [costliest, *added]
    names = [one.detail for one in together if one.detail]
    is_stack = costliest.rule == LAYER_SPLIT_STACK
    return replace(
        costliest,
        array=several([costliest.array, *arrays]),
        bytes=tuple(term for one in together for term in one.bytes),
        detail=several(names) if is_stack and names else costliest.detail,
        cure=_cure_of_all([one.cure for one in together]),
    )


def _cure_of_all(cures: Sequence[Cure | None]) -> Cure | None:
    """Makes one cure of several; where that is not possible, that of the costliest array."""
    first, *others = cures
    if first is None or first.kind in ("constrain-carried", "interleave"):
        return first and replace(first, also=tuple(one for one in others if one is not None))
    if first.kind != "split-like":
        return first
    place = {
        argument: (result, split)
        for cure in (first, *others)
        if cure is not None and cure.kind == first.kind
        for argument, result, split in zip(cure.arguments, cure.results, cure.splits, strict=True)
    }
    return replace(
        first,
        arguments=tuple(place),
        results=tuple(result for result, _ in place.values()),
        splits=tuple(split for _, split in place.values()),
    )
