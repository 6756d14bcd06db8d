"""Synthetic arguments: made on the devices, sharded, the same global values on every mesh (jax)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from automesh.program.execute.value_domains import Domain
from automesh.program.lower.static_args import leaf_dtype, leaf_shape

# Integers that index nothing that we can see run from 1 to this.
_LARGEST_INTEGER = 7
_SCALAR_EXPONENT = -6  # Scalars are learning rates and the like.


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array to be made.

    Attributes:
      index: its place among all leaves; seeds its values.
      dtype: may be a PRNG key type.
      domain: what its values may be.
      sharding: where it goes.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    domain: Domain
    sharding: jax.sharding.Sharding


def plan_leaves(
    tree: Any, shardings: Any, domains: Sequence[Domain], mesh: Mesh
) -> tuple[Leaf, ...]:
    """Describes every array of `tree`.

    Args:
      tree: (args, kwargs) as the compiled step takes them.
      shardings: of its inputs, in the same structure; None for an input that the program does not
        use.
      domains: per leaf.
      mesh: where leaves go that nothing says more about: replicated over it.
    """
    leaves, structure = jax.tree.flatten(tree)
    placed = structure.flatten_up_to(shardings)
    return tuple(
        Leaf(
            index=index,
            shape=leaf_shape(leaf),
            dtype=leaf_dtype(leaf),
            domain=domain,
            sharding=to
            or getattr(leaf, "sharding", None)
            or NamedSharding(mesh, jax.sharding.PartitionSpec()),
        )
        for index, (leaf, to, domain) in enumerate(zip(leaves, placed, domains, strict=True))
    )


def maker(leaves: Sequence[Leaf]) -> Callable[[], list[jax.Array]]:
    """A function that makes the arrays, compiled once: one program for each set of devices."""
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(position)
    programs = [(members, _program([leaves[k] for k in members])) for members in groups.values()]

    def make() -> list[jax.Array]:
        made: dict[int, jax.Array] = {}
        for members, program in programs:
            made.update(zip(members, program(), strict=True))
        return [made[position] for position in range(len(leaves))]

    return make


def _program(leaves: Sequence[Leaf]) -> Callable[[], list[jax.Array]]:
    def synthetic() -> list[jax.Array]:
        return [values(leaf.index, leaf.shape, leaf.dtype, leaf.domain) for leaf in leaves]

    return jax.jit(synthetic, out_shardings=[leaf.sharding for leaf in leaves])


def values(seed: int, shape: tuple[int, ...], dtype: Any, domain: Domain) -> jax.Array:
    """Values that depend on `seed` and on the global position alone.

    Floats have the size that keeps sums over the second-last dimension near 1 (1/sqrt(fan-in), as
    weights are initialized): magnitudes are 1/4 to 2 of it, or 1 to 2 where all are positive;
    scalars are positive, 1/64 to 1/32. Integers are 1 to 7, a scalar 1; booleans are True.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        implementation = dtype._impl  # pyright: ignore[reportPrivateUsage]
        bits = _hash(seed, (*shape, *implementation.key_shape))
        return jax.random.wrap_key_data(bits, impl=implementation.name)
    if dtype == np.bool_:
        return jnp.ones(shape, dtype)
    bits = _hash(seed, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        largest = np.uint32(_largest(dtype, domain))
        number = bits % largest + np.uint32(1) if shape else jnp.ones(shape, np.uint32)
        return number.astype(dtype)
    scale = _scale(shape, dtype)
    # Whole numbers below 2**23 times powers of two: exact until the last conversion, however it is
    # compiled.
    twenty = bits >> 12
    if domain.positive or not shape:
        number = (twenty + np.uint32(2**20)).astype(np.float32) * np.float32(2.0**-20)
    else:
        magnitude = (twenty * np.uint32(7) + np.uint32(2**20)).astype(np.float32) * np.float32(
            2.0**-22
        )
        number = jnp.where((bits & 1).astype(bool), magnitude, -magnitude)
    return (number * scale).astype(dtype)


def values_in_words(shape: tuple[int, ...], dtype: Any, domain: Domain) -> str:
    """What `values` makes: `positive floats`, `integers 1 to 7`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return "random keys"
    if dtype == np.bool_:
        return "True"
    if jnp.issubdtype(dtype, jnp.integer):
        largest = _largest(dtype, domain)
        return f"integers 1 to {largest}" if shape and largest > 1 else "the integer 1"
    if not shape:
        return "a small positive float"
    return "positive floats" if domain.positive else "floats of both signs"


def _largest(dtype: Any, domain: Domain) -> int:
    bound = _LARGEST_INTEGER + 1 if domain.below is None else domain.below
    return max(min(bound - 1, int(jnp.iinfo(dtype).max), 2**31), 1)


def _scale(shape: tuple[int, ...], dtype: Any) -> np.float32:
    """A power of two: multiplying by it is exact."""
    if not shape:
        return np.float32(2.0**_SCALAR_EXPONENT)
    fan_in = shape[-2] if len(shape) > 1 else 1
    exponent = -round(math.log2(max(fan_in, 1)) / 2)
    smallest = jnp.finfo(dtype).minexp if jnp.issubdtype(dtype, jnp.floating) else -126
    return np.float32(2.0 ** min(max(exponent, smallest + 4, -24), 0))


def _hash(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """32 well-mixed bits per element (Chris Wellons' lowbias32 over the flat position)."""
    flat = jnp.full(shape, np.uint32((seed * 0x9E3779B9 + 0x7F4A7C15) % 2**32), np.uint32)
    stride = 1
    for dimension in reversed(range(len(shape))):
        position = jax.lax.broadcasted_iota(np.uint32, shape, dimension)
        flat = flat + position * np.uint32(stride % 2**32)
        stride *= shape[dimension]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        flat = (flat ^ (flat >> shift)) * np.uint32(factor)
    return flat ^ (flat >> 16)
