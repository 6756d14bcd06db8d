"""Finds into how many parts a class may be split, or why it stays whole and how to change that (no
jax)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from automesh.program.infer.dimensions import DimensionMark, Dimensions
from automesh.program.infer.facts import Facts

# Numbers of elements that a chip processes at a time, the better one first.
_LANES = (128, 64)
# A larger share of padding would cost more than a split saves.
_MOST_ADDED = 0.02
_REASONS = (
    (DimensionMark.KEY, "a key is never split"),
    (DimensionMark.WALKED, "a loop walks over it, one of its {size:,} slices a turn"),
    (DimensionMark.KERNEL, "it is the window of a convolution"),
    (DimensionMark.SOLVED, "matrices are factorized or solved along it"),
    (DimensionMark.TANGLED, "reshapes cut it at places that do not fit"),
    (DimensionMark.UNKNOWN, "an operation takes it whose rules are not known"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """See `nouns.DimensionClass`."""

    parts: int
    whole: str = ""
    cure: str = ""
    pieces: tuple[int, ...] = ()


def legality_of(every: Dimensions, facts: Facts, root: int, *, of: int) -> Legality:
    """Finds how a factor may be split.

    Args:
      of: the size of a dimension whose outer part the factor is; larger than the factor if there is
        an inner part.
    """
    size, marks = every.size(root), every.marks(root)
    pieces = tuple(length for (_, length), _ in every.packed(root))
    for mark, reason in _REASONS:
        if marks & mark:
            cure = "reshape it in another order" if mark == DimensionMark.TANGLED else ""
            return Legality(parts=1, whole=reason.format(size=size), cure=cure, pieces=pieces)
    if root in facts.data_sets:
        return Legality(
            parts=1,
            whole="the step takes rows of it at places that only the run knows: to split it "
            "gathers all of it for each",
            cure="split what is taken, by a constraint",
            pieces=pieces,
        )
    parts = math.gcd(*pieces) if pieces else size
    if parts % 2 == 0:
        return Legality(parts=parts, pieces=pieces)
    factors = _as_product(size)
    if pieces:
        whole = f"pieces of {', '.join(map(str, pieces))} lie end to end in it"
        return Legality(parts=1, whole=f"{whole}: no split keeps them apart", pieces=pieces)
    if of > size:
        inner = of // size
        return Legality(
            parts=1,
            whole=f"it is the outer part of {of:,} = {size} * {inner:,}, and {factors} divides by "
            "no mesh axis of an even size: other parts cross its blocks",
            cure="keep it as dimensions of their own",
        )
    whole = f"{factors} divides by no mesh axis of an even size"
    cure = _padded(size) if root in facts.weights else _taken_apart(every, root)
    return Legality(parts=1, whole=whole, cure=cure)


def _as_product(size: int) -> str:
    """Returns the prime factors as text: 50257 is `29 * 1733`."""
    rest, factors, divisor = size, list[int](), 2
    while divisor * divisor <= rest:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    if rest > 1:
        factors.append(rest)
    if len(factors) < 2:
        return str(size)
    return f"{size} = {' * '.join(map(str, factors))}"


def _padded(size: int) -> str:
    """Advises to pad to the next multiple of a chip's lanes, or of half of them, if that adds
    little."""
    for step in _LANES:
        padded = -(-size // step) * step
        if padded <= size * (1 + _MOST_ADDED):
            return f"pad it to {padded}"
    return ""


def _taken_apart(every: Dimensions, root: int) -> str:
    """Advises to pass slices, if the step computes only with slices, such as tokens without the
    last one."""
    sizes = {size for _, size in every.pieces(root) if size > 1}
    if not every.is_cut(root) or len(sizes) != 1 or (size := next(iter(sizes))) % 2:
        return ""
    return f"give the step its slices of {size:,} as arrays of their own"
