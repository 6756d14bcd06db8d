"""Mesh axes that manual regions (shard_map) talk over, read off the traced program (jax)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

# These say over which axes a value may vary; they move nothing.
_SILENT = frozenset(("pvary", "pcast", "pbroadcast"))


def axes_talked_over(traced: jax.stages.Traced) -> frozenset[str]:
    """Names of the axes that collectives, and queries for a device's own position, name.

    A `shard_map` is manual over all axes of its mesh unless told otherwise; one that it neither
    shards anything over nor communicates over is not used by it.
    """
    closed: Any = traced.jaxpr
    return frozenset(_names(closed.jaxpr, inside=False))


def _names(jaxpr: Any, *, inside: bool) -> Iterator[str]:
    for equation in jaxpr.eqns:
        manual = equation.primitive.name == "shard_map"
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _names(inner, inside=inside or manual)
                elif inside and not manual and equation.primitive.name not in _SILENT:
                    yield from _strings(one)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _strings(one)
