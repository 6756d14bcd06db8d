"""Joins classes that are not connected in the program but need only one decision (no jax).

Unrolled layers have classes of their own. So do the hidden layers of an encoder and a decoder, and
the heads of self attention and cross attention. A person who names axes would give them the same
name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from automesh.program.infer.dimensions import DimensionMark, Dimensions, Dims
from automesh.program.infer.facts import Facts, outer
from automesh.program.infer.nouns import ArrayClasses, DimensionClass, Inner, StepClasses

_NUMBER = re.compile(r"\d+")
_PART = re.compile(r"\[[^\]]*\]|\.?[^.\[\]]+")
_MOST_NUMBERS = 6
_Uses = frozenset[tuple[str, int]]
# Kinds of classes with the same meaning everywhere.
_KINDS = ("embed", "mlp", "heads", "head_dim", "group", "expert", "layers")
_BATCH = re.compile(r"batch\d*")
_KIND = re.compile(rf"({'|'.join(_KINDS)})\d*")


def join_parallel(every: Dimensions, found: Facts, weights: Sequence[tuple[str, Dims]]) -> None:
    """Joins classes of equal size that are the same dimensions of the same weights in other layers,
    whose paths differ in one number. No array gets a class twice.

    Args:
      weights: path and dimensions of each parameter.
    """
    for position in range(_MOST_NUMBERS):
        uses: dict[int, set[tuple[str, int]]] = defaultdict(set)
        any_number = False
        for name, dims in weights:
            pattern = _without_number(name, position)
            any_number = any_number or pattern != name
            for place, dim in enumerate(dims):
                root = outer(every, dim)
                if root is not None:
                    uses[root].add((pattern, place))
        if not any_number:
            return
        _join_alike(every, found, weights, {root: frozenset(own) for root, own in uses.items()})


def join_twins(every: Dimensions, found: Facts, weights: Sequence[tuple[str, Dims]]) -> None:
    """Joins classes of equal size that are the same dimensions of the same weights in networks side
    by side whose names differ in a word: a coarse and a fine one, an actor and a critic. Their
    weights must have the same names and shapes. No array gets a class twice.

    Args:
      weights: as for `join_parallel`.
    """
    paths = [tuple(_PART.findall(name)) for name, _ in weights]
    for depth in range(max(map(len, paths), default=0)):
        twins = _twins(every, weights, paths, depth)
        if not twins:
            continue
        uses: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for (name, dims), path in zip(weights, paths, strict=True):
            pattern = name
            if path[: depth + 1] in twins:
                pattern = "".join((*path[:depth], "*", *path[depth + 1 :]))
            for place, dim in enumerate(dims):
                root = outer(every, dim)
                if root is not None:
                    uses[root].add((pattern, place))
        _join_alike(every, found, weights, {root: frozenset(own) for root, own in uses.items()})


def _twins(
    every: Dimensions,
    weights: Sequence[tuple[str, Dims]],
    paths: Sequence[tuple[str, ...]],
    depth: int,
) -> set[tuple[str, ...]]:
    """Returns the paths of this depth under which several weights are, and beside which there is
    another one with the same weights."""
    under: dict[tuple[str, ...], set[tuple[tuple[str, ...], tuple[int, ...]]]] = defaultdict(set)
    for (_, dims), path in zip(weights, paths, strict=True):
        if len(path) > depth + 1:
            sizes = tuple(every.size_of(every.factors(dim)) for dim in dims)
            under[path[: depth + 1]].add((path[depth + 1 :], sizes))
    alike: dict[object, list[tuple[str, ...]]] = defaultdict(list)
    for path, own in under.items():
        if len(own) > 1:
            alike[path[:-1], frozenset(own)].append(path)
    return {path for group in alike.values() if len(group) > 1 for path in group}


def join_kernels(every: Dimensions, found: Facts) -> None:
    """Joins windows of convolutions with equal width, since none is ever split."""
    first: dict[int, int] = {}
    for root in sorted(found.weights):
        if every.find(root) == root and every.marks(root) & DimensionMark.KERNEL:
            every.join((first.setdefault(every.size(root), root),), (root,))


def _without_number(name: str, position: int) -> str:
    numbers = list(_NUMBER.finditer(name))
    if position >= len(numbers):
        return name
    begin, end = numbers[position].span()
    return f"{name[:begin]}*{name[end:]}"


def _join_alike(
    every: Dimensions,
    found: Facts,
    weights: Sequence[tuple[str, Dims]],
    uses: dict[int, _Uses],
) -> None:
    alike: dict[tuple[_Uses, int], list[int]] = defaultdict(list)
    for root, own in uses.items():
        if any("*" in pattern for pattern, _ in own):
            alike[own, every.size(root)].append(root)
    groups = {
        root: number
        for number, group in enumerate(alike.values())
        if len(group) > 1
        for root in group
    }
    if not groups:
        return
    twice: set[int] = set()
    for _, dims in weights:
        own = {root for dim in dims if (root := outer(every, dim)) in groups}
        numbers = [groups[root] for root in own]
        twice |= {number for number in numbers if numbers.count(number) > 1}
    for number, group in enumerate(alike.values()):
        if len(group) > 1 and number not in twice:
            for other in group[1:]:
                every.join((group[0],), (other,))
                found.weights.add(every.find(group[0]))


def one_of_a_kind(found: StepClasses) -> StepClasses:
    """Joins classes of the same kind and size under the name of the first one, except classes that
    occur in one array. Batches are of one kind if they are the same dimensions of arguments whose
    paths differ in numbers: the points at each of several edges."""
    names = _names(found)
    if not names:
        return found

    def dims(those: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(one, one) for one in those)

    def arrays(those: Iterable[ArrayClasses]) -> tuple[ArrayClasses, ...]:
        return tuple(replace(one, dims=dims(one.dims)) for one in those)

    def inner(those: Iterable[Inner]) -> tuple[Inner, ...]:
        return tuple(replace(one, dims=dims(one.dims)) for one in those)

    return replace(
        found,
        classes=_joined(found.classes, names),
        arguments=arrays(found.arguments),
        held=arrays(found.held),
        results=arrays(found.results),
        inner=inner(found.inner),
        activations=inner(found.activations),
        cautions=tuple(
            replace(one, about=names.get(one.about, one.about)) for one in found.cautions
        ),
    )


def _names(found: StepClasses) -> dict[str, str]:
    """Maps the name of each class to the name of the class that it is joined to."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for one in found.classes:
        kind = _KIND.fullmatch(one.name)
        if one.is_batch and _BATCH.fullmatch(one.name) and (places := _numbered(found, one.name)):
            alike[places, one.size, one.parts, one.whole, one.pieces].append(one.name)
        elif kind and not one.is_batch:
            alike[kind[1], one.size, one.whole, one.pieces].append(one.name)
    owned = [
        set(one.dims)
        for those in (
            found.arguments,
            found.held,
            found.results,
            found.inner,
            found.activations,
        )
        for one in those
    ]
    names: dict[str, str] = {}
    for first, *others in alike.values():
        if not any(len(own.intersection((first, *others))) > 1 for own in owned):
            names |= dict.fromkeys(others, first)
    return names


def _numbered(found: StepClasses, name: str) -> frozenset[tuple[str, int]]:
    """Returns the places of a batch in the arguments, without the numbers of their paths; none if
    it shares an argument with another batch, or has one whose path has no number."""
    batches = {one.name for one in found.batches}
    own = [one for one in found.arguments if name in one.dims]
    if any(len(batches.intersection(one.dims)) > 1 or not _NUMBER.search(one.name) for one in own):
        return frozenset()
    return frozenset((_NUMBER.sub("*", one.name), one.dims.index(name)) for one in own)


def _joined(
    classes: Iterable[DimensionClass], names: Mapping[str, str]
) -> tuple[DimensionClass, ...]:
    kept: dict[str, DimensionClass] = {}
    for one in classes:
        name = names.get(one.name, one.name)
        known = kept.get(name)
        if known is None:
            kept[name] = replace(
                one, name=name, pieces=tuple((names.get(part, part), n) for part, n in one.pieces)
            )
        else:
            kept[name] = replace(
                known,
                parts=math.gcd(known.parts, one.parts),
                stored=math.gcd(known.stored, one.stored),
                cure=known.cure or one.cure,
            )
    return tuple(kept.values())
