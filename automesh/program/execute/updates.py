"""Makes a sketch of the update by one step of every float array that it carries (jax).

For each array the same elements are read before and after the step, from whichever devices hold
them: all elements up to 8,192, else one of each of 8,192 equal stretches, so that every shard takes
part. Their difference is computed in float64 on the host, which is exact enough for updates of a
hundred-thousandth of the values. Nothing is copied on the devices, so donated arguments are no
problem.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from automesh.program.distributed import gathered
from automesh.program.execute.prepare import is_elsewhere
from automesh.program.lower.static_args import is_ref
from automesh.program.nouns import RESULT, ArgumentDigest, LeafUpdate, LossVector
from automesh.texts.terminal import as_unicode

SAMPLED = 8192
PROJECTIONS = 8
DIGEST_PROJECTIONS = 2
VECTOR_SAMPLED = 1024
_NARROW_UNIT = 0.25
_SCRAMBLE = 98765.43
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Elements of one array.

    Attributes:
      path: path of the array in the arguments.
      leaf: the array itself, which the step may already have donated.
      values: values of the chosen elements, from the first copy of each.
      apart: largest difference between two copies of an element.
    """

    path: str
    dtype: str
    leaf: Any
    values: Floats
    apart: float


def sampled(args: Any, *, is_shared: bool = False) -> dict[str, Sampled]:
    """Reads the chosen elements of all float arrays among the arguments, by their paths. Donated
    arrays that are made anew before each step are left out.

    Args:
      is_shared: True if several processes run the step, all of which must call this function. A
        process may have no part of an array, as with stages of a pipeline.
    """
    found: dict[str, Sampled] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        one = _sampled(jax.tree_util.keystr(keys), leaf, is_shared=is_shared)
        if one is not None:
            found[one.path] = one
    return found


def _sampled(path: str, leaf: Any, *, is_shared: bool) -> Sampled | None:
    array: Any = leaf[...] if is_ref(leaf) else leaf
    if not isinstance(array, jax.Array) or not _is_float(array) or array.size == 0:
        return None
    if array.is_deleted():
        return None
    values, apart = _elements(array, path, is_shared=is_shared)
    return Sampled(path=path, dtype=str(array.dtype), leaf=leaf, values=values, apart=apart)


def updates_of(before: dict[str, Sampled], after: dict[str, Sampled]) -> tuple[LeafUpdate, ...]:
    """Returns the sketch of the changes between two samples; unchanged arrays are left out."""
    return tuple(
        _update(old, after[path])
        for path, old in before.items()
        if path in after
        # An array that only other processes have is represented by the same stand-in at every step.
        and (after[path].leaf is not old.leaf or is_ref(old.leaf) or is_elsewhere(old.leaf))
        and len(after[path].values) == len(old.values)
    )


def results_of(outputs: Mapping[str, Any], *, is_shared: bool = False) -> tuple[LeafUpdate, ...]:
    """Returns the sketch of the float arrays that a step returns, such as gradients that the script
    applies itself, as if each were the update of zeros.

    Args:
      outputs: leaves of the return value, by their paths.
      is_shared: as in `sampled`.
    """
    found = (
        _sampled(f"{RESULT}{path}", leaf, is_shared=is_shared) for path, leaf in outputs.items()
    )
    return tuple(
        _update(replace(one, values=np.zeros_like(one.values)), one)
        for one in found
        if one is not None
    )


def disturbed(leaf: Any, dtype: str) -> Any:
    """Returns an array whose values are changed by a unit in the last place of a type, up or down.

    Args:
      leaf: a leaf that is no float array is returned unchanged.
      dtype: name of a float type.
    """
    if not isinstance(leaf, jax.Array) or not _is_float(leaf) or leaf.size == 0:
        return leaf
    unit = max(_unit(dtype), float(jnp.finfo(leaf.dtype).eps))
    return _changer(leaf.sharding, unit)(leaf)


@cache
def _changer(sharding: jax.sharding.Sharding, unit: float) -> Any:
    return jax.jit(partial(_change, unit=unit), out_shardings=sharding)


def _change(values: Any, *, unit: float) -> Any:
    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.float32)
    # Pseudo-random, and compiled fast for any sharding. Numbers of Python alone meet the array:
    # `jnp.where` refuses numbers beside an array over whose axes autodiff leaves sums undone
    # (`jax.P(..., reduced={'data'})`).
    up = (jnp.sin(wide * _SCRAMBLE) > 0).astype(wide.dtype)
    return (wide * (1 - unit + 2 * unit * up)).astype(values.dtype)


def with_sensitivities(
    updates: tuple[LeafUpdate, ...], disturbed: tuple[LeafUpdate, ...]
) -> tuple[LeafUpdate, ...]:
    """Adds to updates their distance from those of disturbed arguments."""
    others = {one.path: one for one in disturbed}
    return tuple(
        replace(update, sensitivity=_apart(update, others[update.path]))
        if update.path in others
        else update
        for update in updates
    )


def _apart(one: LeafUpdate, other: LeafUpdate) -> float:
    scale = max(one.norm, other.norm)
    gaps = np.subtract(one.projections, other.projections)
    return float(np.sqrt(np.mean(gaps**2)) / scale) if scale else 0.0


def _unit(dtype: str) -> float:
    try:
        return float(jnp.finfo(dtype).eps)
    except (TypeError, ValueError):  # This jax does not know the type.
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
    """Returns pseudo-random signs, which are the same in every process for an array of this path
    and size."""
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(as_unicode(path).encode())))
    return luck.choice(np.array([-1.0, 1.0]), size=(PROJECTIONS, count))


def _places(size: int, path: str, most: int) -> NDArray[np.int64]:
    """Returns the flat indices of the elements that are read."""
    if size <= most:
        return np.arange(size)
    luck = np.random.Generator(np.random.PCG64(zlib.crc32(as_unicode(path).encode()) + 1))
    stretch = size / most
    return ((np.arange(most) + luck.random(most)) * stretch).astype(np.int64)


def _elements(
    array: Any, path: str, *, is_shared: bool, most: int = SAMPLED
) -> tuple[Floats, float]:
    """Returns at most `most` chosen elements, and the largest difference between copies of them."""
    places = np.unravel_index(_places(array.size, path, most), array.shape) if array.shape else ()
    count = min(array.size, most)
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
    if array.is_fully_addressable and not is_shared:
        return values, apart
    return _elements_of_all(values, apart)


def _elements_of_all(values: Floats, apart: float) -> tuple[Floats, float]:
    """Combines the elements that the processes have read, each from its own devices.

    Args:
      values: NaN where this process has none.
    """
    rows = gathered(np.append(values, apart))
    known, aparts = rows[:, :-1], rows[:, -1]
    # Each element is taken from the first process that has it, so the result is the same in all.
    first = np.argmax(~np.isnan(known), axis=0)
    chosen = np.take_along_axis(known, first[None], axis=0)[0]
    gaps = np.abs(known - chosen)
    return chosen, float(max(aparts.max(), np.nanmax(gaps, initial=0.0)))


def _read(data: Any, index: tuple[NDArray[np.int64], ...]) -> Floats:
    """Returns the chosen elements of one shard, from its device."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[index].astype(np.float64).reshape(-1)  # No copy of the whole.
    return np.asarray(data[index]).astype(np.float64).reshape(-1)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


# Digests of arguments and of arrays of losses, from the same elements on every mesh.


def digests_of(
    args: Any, kwargs: Any, known: Mapping[str, Sampled], *, is_shared: bool = False
) -> tuple[ArgumentDigest, ...]:
    """Returns digests of the values of all arrays among the arguments of a step.

    Args:
      known: elements of float arrays in `args` that are already read.
      is_shared: as in `sampled`.
    """
    found: list[ArgumentDigest] = []
    for what, tree in (("args", args), ("kwargs", kwargs)):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            path = jax.tree_util.keystr(keys)
            if what == "args" and path in known:
                one = known[path]
                shape = tuple(np.shape(leaf))
                found.append(_digest(f"{what}{path}", one.dtype, one.values, shape))
                continue
            array: Any = leaf[...] if is_ref(leaf) else leaf
            if not isinstance(array, jax.Array) or array.size == 0:
                continue
            dtype, shape = str(array.dtype), tuple(array.shape)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                array = jax.random.key_data(array)
            if jnp.issubdtype(array.dtype, jnp.complexfloating):
                array = jnp.abs(array)
            values, _ = _elements(array, path, is_shared=is_shared)
            found.append(_digest(f"{what}{path}", dtype, values, shape))
    return tuple(found)


def _digest(path: str, dtype: str, values: Floats, shape: tuple[int, ...]) -> ArgumentDigest:
    values = np.nan_to_num(values)
    signs = _signs(path, len(values))[:DIGEST_PROJECTIONS]
    return ArgumentDigest(
        path=path,
        dtype=dtype,
        count=len(values),
        norm=float(np.linalg.norm(values)),
        projections=tuple(float(one) for one in signs @ values),
        shape=shape,
    )


def loss_vectors(arrays: Mapping[str, Any], *, is_shared: bool = False) -> tuple[LossVector, ...]:
    """Returns the chosen elements of arrays of losses: all up to 1,024, else one of each of 1,024
    equal stretches.

    Args:
      arrays: the arrays by their paths in the return value.
      is_shared: as in `sampled`.
    """
    found: list[LossVector] = []
    for path, array in arrays.items():
        values, _ = _elements(array, path, is_shared=is_shared, most=VECTOR_SAMPLED)
        found.append(
            LossVector(path=path, size=array.size, values=tuple(float(one) for one in values))
        )
    return tuple(found)
