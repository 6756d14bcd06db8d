"""Arrays without data, as a script sees them (jax).

Private in jax: tracers (`jax._src.core.Tracer`). Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from automesh.program.absent.device_queries import attached
from automesh.program.capture.abstract.deferred import CHEAP, Deferred, computed
from automesh.program.capture.abstract.record import STATE, needed, note_read
from automesh.program.capture.abstract.work import aval_bytes
from automesh.program.capture.known_numbers import KnownNumber
from automesh.program.capture.unread import UNREAD

_CORE: Any = importlib.import_module("jax._src.core")
_TAKES_AVAL = "aval" in inspect.signature(_CORE.Tracer.__init__).parameters


# Functions of jax that fail if an array has no values, and those by which they ask.
_NEEDS = frozenset({"concrete_or_error", "expand_bool_indices"})
_WAYS_TO_ASK = frozenset({"_asking", "to_concrete_value", "is_concrete"})


def _asking() -> str:
    """Returns the name of the function that asks, by jax's own ways to ask, whether an array has
    values."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in _WAYS_TO_ASK:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf is an array without data."""
    return isinstance(leaf, AbstractArray)


def described(tree: Any) -> Any:
    """Returns a tree with each array without data as a `jax.ShapeDtypeStruct`; other leaves stay as
    they are."""
    if STATE.trace is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.described() if is_abstract(leaf) else leaf, tree)


def without_data(leaf: Any) -> Any:
    """Returns an argument of a step: an array as a `jax.ShapeDtypeStruct`, anything else as it
    is."""
    if is_abstract(leaf):
        return leaf.described()
    if isinstance(leaf, jax.Array):
        to = leaf.sharding if getattr(leaf, "committed", True) else None
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to, weak_type=weak)
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def bytes_alive() -> int:
    """Returns the bytes of the arrays that a script holds, with and without data."""
    real = sum(int(array.nbytes) for array in jax.live_arrays())
    return real + STATE.alive_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractShard:
    """The part of an array without data that one device holds; replaces `jax.Shard`."""

    device: Any
    index: Any
    replica_id: int
    data: AbstractArray


class AbstractArray(_CORE.Tracer):
    """An array without data, as the script sees it."""

    __slots__ = ("later", "nbytes", "number", "placed", "state")

    number: KnownNumber | None
    later: Deferred | None
    placed: Sharding | None
    nbytes: int

    def __init__(self, trace: Any, aval: Any, sharding: Sharding | None) -> None:
        # The attributes of a tracer have other names in other versions of jax.
        super().__init__(trace, aval) if _TAKES_AVAL else super().__init__(trace)
        if not _TAKES_AVAL:
            self.aval = aval
        self.placed = sharding
        self.number = None
        self.later = None
        self.nbytes = aval_bytes(aval)
        # Python empties modules before it deletes the last arrays, so each array keeps the state
        # itself.
        self.state = STATE
        STATE.alive_bytes += self.nbytes
        STATE.most_bytes = max(STATE.most_bytes, STATE.alive_bytes)

    def __del__(self) -> None:
        self.state.alive_bytes -= self.nbytes

    def described(self) -> jax.ShapeDtypeStruct:
        """Returns its shape, its type and its sharding."""
        aval: Any = self.aval
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=self.placed, weak_type=bool(aval.weak_type)
        )

    @property
    def sharding(self) -> Sharding:
        return self.placed or SingleDeviceSharding(attached()[0])

    @property
    def committed(self) -> bool:
        return self.placed is not None

    _committed = committed

    @property
    def device(self) -> Any:
        return next(iter(self.sharding.device_set))

    @property
    def is_fully_addressable(self) -> bool:
        return True

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharding.is_fully_replicated

    def devices(self) -> set[Any]:
        return self.sharding.device_set

    def block_until_ready(self) -> AbstractArray:
        return self

    def copy_to_host_async(self) -> None:
        """Does nothing: there is no data to copy."""

    def delete(self) -> None:
        """Does nothing: there is no data to delete."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        """Returns True, as jax does for an array that is computed."""
        return True

    @property
    def format(self) -> Any:
        """As jax's, with a layout that is left to the compiler."""
        return Format(None, self.sharding)

    def on_device_size_in_bytes(self) -> int:
        """Returns the bytes on all its devices together, as jax does."""
        return sum(shard.data.nbytes for shard in self.addressable_shards)

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'jax.Array'")

    def __float__(self) -> float:
        aval: Any = self.aval
        if aval.shape:
            raise needed(self)
        value = self._value_if_known()
        if value is not None:
            return float(value)
        note_read()
        return UNREAD

    def _value_if_known(self) -> Any:
        """Returns the number that this array holds; None if that is not known without data."""
        if self.number is None:
            return None
        with _CORE.set_current_trace(_CORE.eval_trace):
            value = self.number.value()
        if value is not None and self.number.reads_nan:
            # A script that decides by a number goes another way with nan, or fails.
            if self.number.compares and self.later is not None:
                real = computed(self.later, most=CHEAP)
                if real is not None:
                    return real
            place = note_read()
            STATE.decided = STATE.decided or place
        return value

    def _told(self) -> Any:
        """Returns the values that this array holds, and computes them if need be.

        Raises:
          ValueNeeded: they cannot be computed.
        """
        value = self._computed()
        if value is None:
            raise needed(self)
        return value

    def _computed(self) -> Any:
        value = self._value_if_known()
        return computed(self.later) if value is None and self.later is not None else value

    def to_concrete_value(self) -> Any:
        """Returns the values of an array that jax fails without, as where they decide the shape of
        a result. None of others, for which jax asks whether there are values, too."""
        return self._computed() if _asking() in _NEEDS else None

    def __bool__(self) -> bool:
        return bool(self._told())

    def __int__(self) -> int:
        return int(self._told())

    def __index__(self) -> int:
        return int(self._told())

    def __format__(self, spec: str) -> str:
        aval: Any = self.aval
        value = self._value_if_known()
        if value is not None:
            return format(value[()], spec)
        if spec and aval.shape:
            raise TypeError("unsupported format string passed to Array.__format__")
        note_read()
        return format(math.nan, spec.rstrip("d")) if spec else str(self)

    def __repr__(self) -> str:
        aval: Any = self.aval
        return f"Array({'nan' if not aval.shape else '...'}, {aval.str_short()})"

    def __str__(self) -> str:
        aval: Any = self.aval
        value = self._value_if_known()
        if value is not None:
            return str(value)
        return repr(self) if aval.shape else "nan"

    def item(self, *_: Any) -> Any:
        aval: Any = self.aval
        if jax.numpy.issubdtype(aval.dtype, np.floating) and not aval.shape:
            return float(self)
        return self._told().item()

    def tolist(self) -> Any:
        """Returns nested lists, as jax does."""
        aval: Any = self.aval
        return self._told().tolist() if aval.shape else self.item()

    def addressable_data(self, index: int) -> AbstractArray:
        """Returns the array of one device, as jax does."""
        return self.addressable_shards[index].data

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        aval: Any = self.aval
        is_shown = not aval.shape and jax.numpy.issubdtype(aval.dtype, np.floating)
        # `jax.device_get` of losses, and means of them, are to be shown, too.
        value = np.asarray(float(self), aval.dtype) if is_shown else self._told()
        return np.array(value, dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[Any]:
        aval: Any = self.aval
        if not aval.shape:
            raise TypeError("iteration over a 0-d array")
        # One by one: an operation that gives all rows of a large array takes minutes to compile.
        return (self[row] for row in range(aval.shape[0]))

    def _asked(self, *_: Any, **__: Any) -> Any:
        raise needed(self)

    __complex__ = __dlpack__ = _asked
    __hex__ = __oct__ = __reduce__ = _asked
    tobytes = unsafe_buffer_pointer = _asked

    @property
    def addressable_shards(self) -> list[AbstractShard]:
        aval: Any = self.aval
        to, shape = self.sharding, tuple(aval.shape)
        part = jax.ShapeDtypeStruct(to.shard_shape(shape), aval.dtype)
        seen: dict[str, int] = {}
        shards: list[AbstractShard] = []
        for device, index in to.devices_indices_map(shape).items():
            seen[str(index)] = seen.get(str(index), -1) + 1
            shards.append(
                AbstractShard(
                    device=device,
                    index=index,
                    replica_id=seen[str(index)],
                    data=_part_of(part, device),
                )
            )
        return shards

    @property
    def global_shards(self) -> list[AbstractShard]:
        return self.addressable_shards


def typed_on_mesh(aval: Any, sharding: Sharding | None) -> Any:
    """Returns the type that jax gives to an array with a sharding: with its mesh. A jitted function
    is then traced once, for the description of its arguments and for its run."""
    update: Any = getattr(_CORE, "update_aval_with_sharding", None)
    mesh: Any = getattr(getattr(aval, "sharding", None), "mesh", None)
    return aval if update is None or mesh is None or not mesh.empty else update(aval, sharding)


def _part_of(part: jax.ShapeDtypeStruct, device: Any) -> AbstractArray:
    return AbstractArray(STATE.trace, _CORE.typeof(part), SingleDeviceSharding(device))
