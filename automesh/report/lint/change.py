"""A cure that was tried, as one would write it in the script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from automesh.cost.terms import Cure, Finding
from automesh.texts.terminal import clean

_ARGUMENT = re.compile(r"args\[(\d+)\]")
_PARAMETER = re.compile(r"^\w+$")
Split = tuple[tuple[str, ...], ...]


def change_of(finding: Finding, cure: Cure) -> str:
    """Says what was changed."""
    return _CHANGES[cure.kind](finding, cure)


def spec(split: Split) -> str:
    """Writes a split as a PartitionSpec: `P('fsdp', None)`.

    >>> spec(((), ("dp", "tp")))
    "P(None, ('dp', 'tp'))"
    """
    parts = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in split]
    return f"P({', '.join(map(repr, parts))})"


def _donate(finding: Finding, _: Cure) -> str:
    numbers = sorted({int(number) for number in _ARGUMENT.findall(finding.detail)})
    if not numbers:
        names = tuple(finding.detail.split(", "))
        if not all(map(_PARAMETER.match, names)):
            return "donate_argnames of these arguments in jax.jit"
        return f"jax.jit(..., donate_argnames={names if names[1:] else names[0]!r})"
    told = numbers[0] if len(numbers) == 1 else tuple(numbers)
    return f"jax.jit(..., donate_argnums={told})"


def _return_as_given(finding: Finding, _: Cure) -> str:
    return f"out_shardings of {clean(finding.array)}: the shardings that it is given with"


def _split_like(finding: Finding, cure: Cure) -> str:
    name = finding.detail if finding.rule == "layer-split-stack" else finding.array
    return f"NamedSharding(mesh, {_specs(cure.splits)}) for {clean(name)}, in and out"


def _specs(splits: Iterable[Split]) -> str:
    """Lists each sharding once, as `P('fsdp') and P(None, 'fsdp')`."""
    return " and ".join(dict.fromkeys(map(spec, splits)))


def _hops(_: Finding, cure: Cure) -> str:
    between = ", then ".join(spec(split) for split in cure.splits[1:-1])
    return f"with_sharding_constraint to {between} first, then to {spec(cure.splits[-1])}"


def _carried(_: Finding, cure: Cure) -> str:
    splits = _specs(one.splits[0] for one in (cure, *cure.also))
    return f"with_sharding_constraint(..., NamedSharding(mesh, {splits})) of what is added up"


def _interleave(finding: Finding, cure: Cure) -> str:
    split = cure.splits[0] if cure.splits else ()
    place = next((d for d, axes in enumerate(split) if {*axes} & {*finding.axes}), 0)
    sizes = [str(size) for size in cure.shape]
    sizes[place] = f"{sizes[place]} // n, n"
    return f"x.reshape({', '.join(sizes)}).swapaxes({place}, {place + 1}) of n microbatches"


def _convert(finding: Finding, _: Cure) -> str:
    return f".astype(...) of what replaces {clean(finding.array)}, to the type that it had"


_CHANGES: Mapping[str, Callable[[Finding, Cure], str]] = {
    "donate": _donate,
    "return-as-given": _return_as_given,
    "split-like": _split_like,
    "hops": _hops,
    "constrain-carried": _carried,
    "interleave": _interleave,
    "convert-back": _convert,
}
