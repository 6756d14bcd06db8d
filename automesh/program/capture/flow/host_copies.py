"""Keeps arrays of a script on the host, from which they can be made again as they were (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from automesh.program.capture.hooks import Call
from automesh.program.capture.step_call import weakly_typed
from automesh.program.lower.static_args import is_ref


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeaf:
    """A leaf of the arguments that is kept on the host.

    Attributes:
      value: a copy of an array; anything else as it is.
      sharding: the sharding of an array of jax; None for any other leaf.
      key_implementation: name of the generator of an array of random keys; empty for other arrays.
      is_committed: whether jax keeps the array on its devices.
      is_weak: whether its type is weak: it gives way to the type of the array that it is combined
        with.
    """

    value: Any
    sharding: Any = None
    key_implementation: str = ""
    is_ref: bool = False
    is_committed: bool = True
    is_weak: bool = False

    def made(self) -> Any:
        """Returns the leaf, as the script had it."""
        if self.sharding is None:
            return self.value
        array = (
            jax.device_put(self.value, self.sharding)
            if self.is_committed
            else jax.numpy.asarray(self.value)
        )
        if self.key_implementation:
            array = jax.random.wrap_key_data(array, impl=self.key_implementation)
        if self.is_weak:
            array = weakly_typed(array)
        return jax.new_ref(array) if self.is_ref else array


def copied(leaves: Sequence[Any], limit_bytes: int) -> tuple[HostLeaf, ...] | None:
    """Copies leaves to the host; returns None if they have more bytes, or are partly on other
    hosts."""
    if sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves) > limit_bytes:
        return None
    found = [_on_host(leaf) for leaf in leaves]
    if any(leaf is None for leaf in found):
        return None
    return tuple(leaf for leaf in found if leaf)


def _on_host(leaf: Any) -> HostLeaf | None:
    reference = is_ref(leaf)
    array = leaf[...] if reference else leaf
    if isinstance(array, np.ndarray):
        # A loader of data may write the next batch into the same array.
        return HostLeaf(value=array.copy())
    if not isinstance(array, jax.Array):
        return HostLeaf(value=leaf)
    if not array.is_fully_addressable:
        return None
    implementation = ""
    sharding = array.sharding
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        implementation = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
        sharding = array.sharding
    # A view would share its buffer with the array, which the step may overwrite.
    return HostLeaf(
        value=np.array(array, copy=True),
        sharding=sharding,
        key_implementation=implementation,
        is_ref=reference,
        is_committed=bool(getattr(array, "committed", True)),
        is_weak=bool(getattr(array, "weak_type", False)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeafPlace:
    """Stands for a leaf of the arguments, by its position among the dynamic ones."""

    number: int


def without_leaves(call: Call, leaves: Sequence[Any]) -> Call:
    """Returns a call that keeps none of its arrays alive and cannot be run.

    Args:
      leaves: leaves of its dynamic arguments.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def placed(leaf: Any) -> Any:
        number = places.get(id(leaf))
        return leaf if number is None else _LeafPlace(number=number)

    args, kwargs = jax.tree.map(placed, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs, run=_nothing)


def with_leaves(call: Call, leaves: Sequence[Any]) -> Call:
    """Returns a call that `without_leaves` has made, with its arrays."""

    def taken(leaf: Any) -> Any:
        return leaves[leaf.number] if isinstance(leaf, _LeafPlace) else leaf

    args, kwargs = jax.tree.map(taken, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _nothing() -> None:
    """Runs nothing: the call is only traced."""
