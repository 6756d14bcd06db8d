"""The dimensions of a partition spec (jax)."""

from __future__ import annotations

from typing import Any


def entries_of(spec: Any) -> tuple[Any, ...]:
    """Returns the entry of a partition spec for each dimension: an axis, several axes, or None.

    A spec that also names axes over which an array is reduced or unreduced (Explicit axes,
    `jax.P(..., reduced={'data'})`) refuses to be iterated from jax 0.12 on; its `partitions` are
    the same in all versions that have them.
    """
    found: Any = getattr(spec, "partitions", None)
    return tuple(spec) if found is None else tuple(found)
