"""What one step changes: a sketch of the update of every float array that it carries on (jax).

Of each array the same elements are read before and after the step, on whichever devices they are:
all of 8,192, else one of each of 8,192 equal stretches, so that every shard has its share. Their
difference is taken in float64 on the host, where an update of a hundred-thousandth of the values
loses nothing, and nothing is copied on the devices, so that donated arguments do no harm.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from automesh.program.lower.static_args import is_ref
from automesh.program.nouns import LeafUpdate

SAMPLED = 8192
PROJECTIONS = 8
_NARROW_UNIT = 0.25
_SCRAMBLE = 98765.43
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Elements of one array.

    Attributes:
      path: where it is among the arguments.
      leaf: the array itself, which the step may have donated since.
      values: of the chosen elements, from the first copy of each.
      apart: largest difference between two copies of an element.
    """

    path: str
    dtype: str
    leaf: Any
    values: Floats
    apart: float


def sampled(args: Any) -> dict[str, Sampled]:
    """Reads the chosen elements of all float arrays among the arguments, by their paths."""
    found: dict[str, Sampled] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        array: Any = leaf[...] if is_ref(leaf) else leaf
        if not isinstance(array, jax.Array) or not _is_float(array) or array.size == 0:
            continue
        path = jax.tree_util.keystr(keys)
        values, apart = _elements(array, path)
        found[path] = Sampled(
            path=path, dtype=str(array.dtype), leaf=leaf, values=values, apart=apart
        )
    return found


def updates_of(before: dict[str, Sampled], after: dict[str, Sampled]) -> tuple[LeafUpdate, ...]:
    """The sketch of what changed between two samples; arrays that stayed the same are left out."""
    return tuple(
        _update(old, after[path])
        for path, old in before.items()
        if path in after
        and (after[path].leaf is not old.leaf or is_ref(old.leaf))
        and len(after[path].values) == len(old.values)
    )


def disturbed(leaf: Any, dtype: str) -> Any:
    """An array whose values are changed by a unit in the last place of a type, up or down.

    Args:
      leaf: what is no array of floats stays as it is.
      dtype: name of a float type.
    """
    if not isinstance(leaf, jax.Array) or not _is_float(leaf) or leaf.size == 0:
        return leaf
    unit = max(_unit(dtype), float(jnp.finfo(leaf.dtype).eps))
    return _changer(leaf.sharding)(leaf, unit)


@cache
def _changer(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(_change, out_shardings=sharding)


def _change(values: Any, unit: Any) -> Any:
    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.float32)
    # As good as chance, and compiled in no time on any sharding.
    up = jnp.sin(wide * _SCRAMBLE) > 0
    return (wide * jnp.where(up, 1 + unit, 1 - unit)).astype(values.dtype)


def with_sensitivities(
    updates: tuple[LeafUpdate, ...], disturbed: tuple[LeafUpdate, ...]
) -> tuple[LeafUpdate, ...]:
    """Updates with how far those from disturbed arguments are from them."""
    others = {one.path: one for one in disturbed}
    return tuple(
        replace(one, sensitivity=_apart(one, others[one.path])) if one.path in others else one
        for one in updates
    )


def _apart(one: LeafUpdate, other: LeafUpdate) -> float:
    scale = max(one.norm, other.norm)
    gaps = np.subtract(one.projections, other.projections)
    return float(np.sqrt(np.mean(gaps**2)) / scale) if scale else 0.0


def _unit(dtype: str) -> float:
    try:
        return float(jnp.finfo(dtype).eps)
    except (TypeError, ValueError):  # A type that this jax does not know.
        return _NARROW_UNIT


def _update(old: Sampled, new: Sampled) -> LeafUpdate:
    change = new.values - old.values
    is_finite = bool(np.all(np.isfinite(change)))
    change = change if is_finite else np.zeros_like(change)
    sizes = np.abs(change)
    middle = float(sizes.mean())
    return LeafUpdate(
        path=new.path,
        dtype=new.dtype,
        norm=float(np.linalg.norm(change)),
        old_norm=float(np.linalg.norm(np.nan_to_num(old.values))),
        spread=float(sizes.std()) / middle if middle else 0.0,
        apart=new.apart,
        count=len(change),
        is_finite=is_finite,
        projections=tuple(float(one) for one in _signs(new.path, len(change)) @ change),
    )


def _signs(path: str, count: int) -> Floats:
    """Random signs, the same for an array of this path and size in every process."""
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(path.encode())))
    return luck.choice(np.array([-1.0, 1.0]), size=(PROJECTIONS, count))


def _places(size: int, path: str) -> NDArray[np.int64]:
    """Which elements are read, as places in the flattened array."""
    if size <= SAMPLED:
        return np.arange(size)
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(path.encode()) + 1))
    stretch = size / SAMPLED
    return ((np.arange(SAMPLED) + luck.random(SAMPLED)) * stretch).astype(np.int64)


def _elements(array: Any, path: str) -> tuple[Floats, float]:
    """The chosen elements, and how far copies of them are apart at most."""
    places = np.unravel_index(_places(array.size, path), array.shape) if array.shape else ()
    count = min(array.size, SAMPLED)
    values = np.full(count, np.nan)
    is_read = np.zeros(count, dtype=bool)
    apart = 0.0
    for shard in array.addressable_shards:
        inside = np.ones(count, dtype=bool)
        local: list[NDArray[np.int64]] = []
        for dim, part in enumerate(shard.index):
            start = part.start or 0
            stop = array.shape[dim] if part.stop is None else part.stop
            inside &= (places[dim] >= start) & (places[dim] < stop)
            local.append(places[dim] - start)
        if not inside.any():
            continue
        read = _read(shard.data, tuple(one[inside] for one in local))
        known = is_read[inside]
        if known.any():
            gaps = np.abs(values[inside] - read)[known]
            apart = max(apart, float(np.max(np.nan_to_num(gaps))))
        values[inside] = np.where(known, values[inside], read)
        is_read |= inside
    return values, apart


def _read(data: Any, index: tuple[NDArray[np.int64], ...]) -> Floats:
    """Elements of one shard, from its device."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[index].astype(np.float64).reshape(-1)  # No copy of the whole.
    return np.asarray(data[index]).astype(np.float64).reshape(-1)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)
