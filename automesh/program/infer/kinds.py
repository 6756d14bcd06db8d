"""Classes of one kind that no array tells apart are one (no jax).

An encoder and a decoder have hidden layers of their own, self attention and cross attention heads
of their own: nothing in the flow joins them. Whoever names axes by hand calls them the same, and
one decision for all of them is enough.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from automesh.program.infer.nouns import ArrayClasses, DimensionClass, Inner, StepClasses

# Kinds whose members mean the same wherever they are.
_KINDS = ("embed", "mlp", "heads", "head_dim", "group", "expert", "layers")
_KIND = re.compile(rf"({'|'.join(_KINDS)})\d*")


def one_of_a_kind(found: StepClasses) -> StepClasses:
    """A step whose classes of the same kind and size are one, called as the first of them; those
    that some array has both of stay apart."""
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
    """By name of a class, the one that it is joined to."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for one in found.classes:
        kind = _KIND.fullmatch(one.name)
        if kind and not one.is_batch:
            alike[kind[1], one.size, one.whole, one.pieces].append(one.name)
    owned = [
        set(one.dims)
        for those in (found.arguments, found.held, found.results, found.activations)
        for one in those
    ]
    names: dict[str, str] = {}
    for first, *others in alike.values():
        if not any(len(own.intersection((first, *others))) > 1 for own in owned):
            names |= dict.fromkeys(others, first)
    return names


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
