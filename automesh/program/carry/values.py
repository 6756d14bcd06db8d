"""Stores the arguments of a step in one file, as they were in the script's run (jax).

Each array is written once per content, whole and on the host. A reader maps the file into memory
and puts its arrays on the devices of a plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from automesh.program.capture.abstract.arrays import is_abstract
from automesh.program.capture.step_call import weakly_typed
from automesh.program.lower.static_args import is_ref

_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLeaf:
    """One array, or one number, of the arguments or of the trace.

    Attributes:
      shape, dtype: shape and type of the array; for an array of random keys, those of the keys.
      weak_type: whether its type is weak in jax's sense, as that of a Python number.
      is_ref: whether it is a mutable reference to the array.
      is_host: whether it is a NumPy array, which jax copies to the devices at every call.
      number: the value of a Python number.
      key_implementation: implementation of an array of random keys.
      offset, stored_shape, stored_dtype: place and form of its values in the file; -1 for none.
      digest: digest of its values, in hex.
    """

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False
    is_ref: bool = False
    is_host: bool = False
    number: bool | int | float | complex | None = None
    key_implementation: str = ""
    offset: int = -1
    stored_shape: tuple[int, ...] = ()
    stored_dtype: str = ""
    digest: str = ""

    @property
    def has_values(self) -> bool:
        return self.number is not None or self.offset >= 0


def bytes_of(leaves: Sequence[Any]) -> int:
    """Returns the bytes that the values of these leaves take in a file."""
    return sum(int(getattr(_array_of(leaf), "nbytes", 0) or 0) for leaf in leaves)


def write_values(leaves: Sequence[Any], path: Path, *, with_values: bool) -> tuple[StoredLeaf, ...]:
    """Writes leaves to a new file.

    Args:
      with_values: False to write only descriptions.
    """
    found: list[StoredLeaf] = []
    known: dict[tuple[str, tuple[int, ...], str], int] = {}
    with path.open("xb") as file:
        for leaf in leaves:
            described = _described(leaf)
            if described.number is not None or not with_values or not _is_here(leaf):
                found.append(described)
                continue
            # Not `ascontiguousarray`, which gives a number one dimension.
            values = np.asarray(_on_host(leaf), order="C")
            digest = digest_of(np.frombuffer(values.tobytes(), dtype=np.uint8))
            key = (digest, values.shape, str(values.dtype))
            if key not in known:
                file.write(b"\0" * (-file.tell() % _ALIGNED))
                known[key] = file.tell()
                file.write(values.tobytes())
            found.append(
                _with_place(described, known[key], values.shape, str(values.dtype), digest)
            )
        file.write(b"\0")  # A file without bytes cannot be mapped.
    return tuple(found)


def digest_of(content: np.ndarray[Any, Any] | bytes) -> str:
    """Returns the digest of some bytes, in hex."""
    return hashlib.blake2b(memoryview(content), digest_size=16).hexdigest()


def _with_place(
    leaf: StoredLeaf, offset: int, shape: tuple[int, ...], dtype: str, digest: str
) -> StoredLeaf:
    return StoredLeaf(
        shape=leaf.shape,
        dtype=leaf.dtype,
        weak_type=leaf.weak_type,
        is_ref=leaf.is_ref,
        is_host=leaf.is_host,
        key_implementation=leaf.key_implementation,
        offset=offset,
        stored_shape=shape,
        stored_dtype=dtype,
        digest=digest,
    )


def _array_of(leaf: Any) -> Any:
    return leaf[...] if isinstance(leaf, jax.Ref) else leaf


def _is_here(leaf: Any) -> bool:
    array = _array_of(leaf)
    if isinstance(array, (np.ndarray, np.generic)):
        return True
    return isinstance(array, jax.Array) and _has_data(array) and array.is_fully_addressable


def _has_data(array: Any) -> bool:
    return not is_abstract(array)


def _is_key(array: Any) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    array = _array_of(leaf)
    if isinstance(array, jax.Array) and _is_key(array):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _described(leaf: Any) -> StoredLeaf:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return StoredLeaf(shape=(), dtype=str(jnp.result_type(leaf)), number=leaf, weak_type=True)
    array: Any = _array_of(leaf)
    is_abstract_ref = not isinstance(leaf, jax.Ref) and is_ref(leaf)
    implementation = ""
    if isinstance(array, (np.ndarray, np.generic)):
        # The type that jax uses: without 64 bits unless these are enabled.
        dtype = str(jax.dtypes.canonicalize_dtype(array.dtype))
        return StoredLeaf(shape=tuple(array.shape), dtype=dtype, is_host=True)
    if _is_key(array):
        # Of a key that is only described jax does not tell it.
        is_here = isinstance(array, jax.Array) and _has_data(array)
        implementation = str(jax.random.key_impl(array)) if is_here else ""
        implementation = implementation or str(cast(Any, array.dtype)._impl.name)
    return StoredLeaf(
        shape=tuple(map(int, array.shape)),
        dtype="" if implementation else str(array.dtype),
        weak_type=bool(getattr(array, "weak_type", False)),
        is_ref=is_abstract_ref or isinstance(leaf, jax.Ref),
        key_implementation=implementation,
    )


def dtype_of(leaf: StoredLeaf) -> Any:
    """Returns the type of a stored array."""
    if leaf.key_implementation:
        name = leaf.key_implementation
        return jax.eval_shape(lambda: jax.random.key(0, impl=name)).dtype
    return jnp.dtype(leaf.dtype)


class StoredStepLost(Exception):
    """Stored data are missing or damaged; says which file, and how."""


class Values:
    """The values in a file, mapped into memory.

    Raises:
      StoredStepLost: the file is missing, or a value is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:  # ValueError: it is empty.
            raise StoredStepLost(f"{path.name} cannot be read ({error})") from error

    def host(self, leaf: StoredLeaf) -> np.ndarray[Any, Any]:
        """Returns a copy of its values on the host."""
        dtype = jnp.dtype(leaf.stored_dtype)
        count = math.prod(leaf.stored_shape) * dtype.itemsize
        part = np.array(self._bytes[leaf.offset : leaf.offset + count], copy=True)
        if digest_of(part) != leaf.digest:
            raise StoredStepLost(f"{self._name} is damaged")
        return part.view(dtype).reshape(leaf.stored_shape)

    def made(self, leaf: StoredLeaf, sharding: Any) -> Any:
        """Returns the leaf on the devices, or as the script had it.

        Args:
          sharding: sharding of the leaf; None for a leaf without one.
        """
        if leaf.number is not None:
            return leaf.number
        values = self.host(leaf)
        if leaf.is_host and sharding is None:
            return values
        array = jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)
        if leaf.key_implementation:
            array = jax.random.wrap_key_data(array, impl=leaf.key_implementation)
        elif leaf.weak_type and not getattr(array, "weak_type", False):
            array = weakly_typed(array)
        return jax.new_ref(array) if leaf.is_ref else array
