"""Computes the part of a step's work that each class splits over an axis (no jax)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from automesh.program.infer.nouns import ArrayClasses, CautionKind, Role, StepClasses
from automesh.space.mapping import Shares

_WEIGHTS = (Role.PARAMETER, Role.FROZEN)


def shares_of(classes: StepClasses, names: Sequence[str], *, axis: str) -> tuple[Shares, ...]:
    """Returns the numbers of parameter elements that classes split over an axis. Each element is
    one multiplication per token of a batch. Tables that are only looked up do not count.

    Args:
      names: names of the classes that may be split over the axis.
    """
    parts: Counter[tuple[str, ...]] = Counter()
    for one in _multiplied(classes):
        parts[tuple(name for name in names if name in one.dims)] += math.prod(one.shape)
    total = parts.total()
    del parts[()]
    apart = [set(own) for own in parts if len(own) > 1]
    legal = [
        set(some)
        for count in range(1, len(names) + 1)
        for some in itertools.combinations(names, count)
        if not any(len(own.intersection(some)) > 1 for own in apart)
    ]
    split = (sum(n for own, n in parts.items() if some.intersection(own)) for some in legal)
    most = max(split, default=0)
    return (Shares(axis=axis, parts=tuple(parts.items()), total=total, most=most),) if most else ()


def _multiplied(classes: StepClasses) -> list[ArrayClasses]:
    tables = {(one.shape, one.dims) for one in classes.activations if one.is_gathered}
    tied = {one.about for one in classes.cautions if one.kind is CautionKind.TIED}
    return [
        one
        for one in classes.arguments
        if one.role in _WEIGHTS and ((one.shape, one.dims) not in tables or one.name in tied)
    ]
