"""Says why the calls of a step run many programs, where they do (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automesh.program.capture.flow.calls import Function, Variant, form_of

# So many programs are usual, as that of the first call or of a batch with few rows.
_FEW = 2
_SHOWN = 3


def about_programs(function: Function) -> str:
    """Returns a sentence on a function none of whose programs is that of most calls; empty for all
    others."""
    variants = [variant for variant in function.variants if variant.calls]
    usual = function.usual
    if len(variants) <= _FEW or 2 * usual.calls > function.counted:
        return ""
    said = (
        f"`{function.name}` ({function.called_at}) ran {len(variants)} programs in "
        f"{function.counted} calls, and jax compiles each of them"
    )
    if (place := _differing(variants)) is not None:
        name = _name(usual, place)
        forms = list(dict.fromkeys(_form(one, place) for one in variants))
        listed = ", ".join(forms[:_SHOWN]) + (", ..." if len(forms) > _SHOWN else "")
        return f"{said}: {name} is {listed}; what is searched has {_form(usual, place)}"
    names = [
        name
        for place, name in enumerate(usual.static_names)
        if len({repr(one.key[1][place]) for one in variants if place < len(one.key[1])}) > 1
    ]
    if names:
        return (
            f"{said}: its static argument `{names[0]}` differs; pass as an array what is another "
            "number in every step"
        )
    return f"{said}: the structure of its arguments differs"


def _differing(variants: Sequence[Variant]) -> int | None:
    """Returns the first leaf of the arguments whose shape or type differs between variants; None if
    none does."""
    counts = [len(_leaves(one)) for one in variants]
    for place in range(min(counts, default=0)):
        if len({_form(one, place) for one in variants}) > 1:
            return place
    return None


def _leaves(variant: Variant) -> list[Any]:
    return variant.described.leaves if variant.described is not None else []


def _form(variant: Variant, place: int) -> str:
    shape, dtype = form_of(_leaves(variant)[place])
    return f"{dtype}[{','.join(map(str, shape))}]"


def _name(variant: Variant, place: int) -> str:
    names = variant.described.names if variant.described is not None else ()
    return f"`{names[place]}`" if place < len(names) and names[place] else f"argument {place + 1}"
