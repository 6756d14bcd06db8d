"""Says why the calls of a step run several programs, where they do (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automesh.program.capture.flow.calls import Function, Variant, form_of

# So many programs are usual, as that of the first call or of a batch with few rows.
_FEW = 2
_SHOWN = 3
# Static values of these types are shown, and are decisions of the script.
_PLAIN = (bool, str, type(None))
# State that a step with a switch gives back unchanged is named from this part of the arguments on.
_LARGE_PART = 0.05


def about_programs(function: Function) -> str:
    """Returns a sentence on a function none of whose programs is that of most calls, or whose
    program is one of those that a static argument switches between; empty for all others."""
    variants = [variant for variant in function.variants if variant.calls]
    usual = function.usual
    if len(variants) <= _FEW or 2 * usual.calls > function.counted:
        return _about_switches(function, variants) if variants else ""
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


def _about_switches(function: Function, variants: Sequence[Variant]) -> str:
    """Says with which values of its static arguments a function is searched, where it was called
    with others, too; or where it has a switch that is off and gives state back unchanged."""
    usual, place = function.usual, f"`{function.name}` ({function.called_at})"
    found = {
        name: list(dict.fromkeys(_static(one, number) for one in (usual, *variants)))
        for number, name in enumerate(usual.static_names)
        if all(isinstance(_static(one, number), _PLAIN) for one in variants)
    }
    others = {name: values[1:] for name, values in found.items() if values[1:]}
    if others:
        has = " and ".join(f"`{name}={found[name][0]!r}`" for name in others)
        also = " and ".join(
            f"`{name}={value!r}`" for name, values in others.items() for value in values
        )
        return f"{place} was called with {also}, too: what is searched has {has}"
    off = [name for name, (value, *_) in found.items() if value is False]
    kept = _given_back(usual) if off else []
    if not kept:
        return ""
    arrays = f"{kept[0]} and {len(kept) - 1} more" if kept[1:] else kept[0]
    return (
        f"{place} was called with `{off[0]}=False` alone up to here, and gives {arrays} back "
        "unchanged: if another value trains this, what is searched does not"
    )


def _static(variant: Variant, number: int) -> Any:
    """Returns a static value of a variant; those of keywords are stored with their names."""
    values = variant.key[1]
    value: Any = values[number] if number < len(values) else None
    if isinstance(value, tuple) and value[:1] == (variant.static_names[number],):
        return value[1]
    return value


def _given_back(variant: Variant) -> list[str]:
    """Names the large arrays that a step returns as it was given them, the largest first."""
    if variant.described is None:
        return []
    program: Any = variant.described.traced.jaxpr
    outputs = {id(one) for one in program.jaxpr.outvars}
    places = [
        place
        for place, one in enumerate(program.jaxpr.invars[: len(variant.leaf_bytes)])
        if id(one) in outputs
    ]
    total = sum(variant.leaf_bytes[place] for place in places)
    if total < _LARGE_PART * variant.bytes:
        return []
    places.sort(key=lambda place: -variant.leaf_bytes[place])
    return [_name(variant, place) for place in places]


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
