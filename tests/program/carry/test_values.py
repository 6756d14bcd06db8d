"""Arguments come back from a file as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from automesh.program.carry.values import Values, bytes_of, dtype_of, write_values

LEAVES: dict[str, Any] = {
    "float32": lambda: jnp.arange(12.0).reshape(3, 4),
    "bfloat16": lambda: jnp.arange(12.0, dtype=jnp.bfloat16).reshape(3, 4),
    "float8": lambda: jnp.arange(12.0).astype(jnp.float8_e4m3fn),
    "float8_e5m2": lambda: jnp.arange(12.0).astype(jnp.float8_e5m2),
    "int4": lambda: jnp.arange(6).astype(jnp.int4),
    "bool": lambda: jnp.array([True, False, True]),
    "complex": lambda: jnp.arange(3) * (1 + 2j),
    "no dimensions": lambda: jnp.float32(3.5),
    "no elements": lambda: jnp.zeros((0, 4)),
    "weak": lambda: jnp.full((2, 3), 0.25),
    "weak integer": lambda: jnp.full((), 7),
    "special values": lambda: jnp.array([jnp.nan, jnp.inf, -0.0, 1e-45]),
    "keys": lambda: jax.random.split(jax.random.key(3), 4),
    "a key": lambda: jax.random.key(3),
    "keys of rbg": lambda: jax.random.key(3, impl="rbg"),
    "old keys": lambda: jax.random.PRNGKey(3),
    "reversed numpy": lambda: np.arange(12.0, dtype=np.float32).reshape(3, 4)[::-1, ::2],
    "numpy in columns": lambda: np.asfortranarray(np.arange(12, dtype=np.int32).reshape(3, 4)),
    "a number of numpy": lambda: np.float32(2.5),
}


def kept(leaves: list[Any], folder: Path) -> tuple[list[Any], Any]:
    """Leaves after they were written and read."""
    path = folder / "values.bin"
    stored = write_values(leaves, path, with_values=True)
    values = Values(path)
    return [values.made(leaf, None) for leaf in stored], stored


def same(one: Any, other: Any) -> None:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    if isinstance(one, jax.Array) and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert getattr(one, "weak_type", False) == getattr(other, "weak_type", False)


@pytest.mark.parametrize("name", LEAVES)
def test_an_array_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    leaf = LEAVES[name]()
    (made,), (stored,) = kept([leaf], tmp_path)
    same(made, leaf)
    assert isinstance(made, jax.Array) == isinstance(leaf, jax.Array)
    assert stored.has_values
    assert dtype_of(stored) == leaf.dtype
    assert stored.shape == leaf.shape


@pytest.mark.parametrize("name", ["float32", "weak", "keys", "bfloat16", "a number of numpy"])
def test_an_array_is_put_where_it_belongs(name: str, tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    leaf = LEAVES[name]()
    stored = write_values([leaf], tmp_path / "values.bin", with_values=True)
    for to in (NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[3])):
        made = Values(tmp_path / "values.bin").made(stored[0], to)
        assert made.committed
        assert made.sharding.is_equivalent_to(to, made.ndim)
        assert made.dtype == leaf.dtype
        assert getattr(made, "weak_type", False) == getattr(leaf, "weak_type", False)


@pytest.mark.parametrize("number", [3, True, 0.1, 2.5j, -(2**31)])
def test_a_number_of_python_stays_one(number: Any, tmp_path: Path) -> None:
    (made,), (stored,) = kept([number], tmp_path)
    assert type(made) is type(number)
    assert made == number
    assert stored.weak_type
    assert stored.dtype == str(jnp.result_type(number))


def test_a_reference_is_one_to_an_array_of_its_own(tmp_path: Path) -> None:
    reference = jax.new_ref(jnp.ones(3))
    (one, other), _ = kept([reference, reference], tmp_path)
    one[...] = one[...] + 1
    np.testing.assert_array_equal(one[...], 2 * np.ones(3))
    np.testing.assert_array_equal(other[...], np.ones(3))


def test_arrays_of_numpy_count_as_jax_takes_them(tmp_path: Path) -> None:
    stored = write_values([np.ones(3), np.arange(3)], tmp_path / "values.bin", with_values=True)
    assert [leaf.dtype for leaf in stored] == ["float32", "int32"]
    assert all(leaf.is_host for leaf in stored)


def test_equal_arrays_are_stored_once(tmp_path: Path) -> None:
    large = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    leaves = [jnp.asarray(large), large.copy(), jnp.asarray(large) + 1, jnp.asarray(large)]
    made, stored = kept(leaves, tmp_path)
    assert stored[0].offset == stored[1].offset == stored[3].offset != stored[2].offset
    assert (tmp_path / "values.bin").stat().st_size < 2 * large.nbytes + 200
    for one, other in zip(made, leaves, strict=True):
        same(jnp.asarray(one), jnp.asarray(other))
    # The same bytes as another type or in another shape are another array.
    other = [large, large.view(np.int32), large.reshape(10, -1)]
    (tmp_path / "anew").mkdir()
    made, _ = kept(other, tmp_path / "anew")
    for one, two in zip(made, other, strict=True):
        same(one, two)


def test_digests_tell_values_apart(tmp_path: Path) -> None:
    leaves = [jnp.zeros(4), jnp.zeros(4), -jnp.zeros(4), jnp.zeros(4).at[3].set(1e-30)]
    _, stored = kept(leaves, tmp_path)
    digests = [leaf.digest for leaf in stored]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_without_values_arrays_are_described(tmp_path: Path) -> None:
    leaves = [jnp.full((2, 3), 0.25), 3, jax.random.key(0), np.ones(2)]
    weak, number, key, host = write_values(leaves, tmp_path / "values.bin", with_values=False)
    assert (weak.has_values, number.has_values, key.has_values) == (False, True, False)
    assert (weak.shape, weak.dtype, weak.weak_type) == ((2, 3), "float32", True)
    assert dtype_of(key) == jax.random.key(0).dtype
    assert host.is_host
    assert (tmp_path / "values.bin").stat().st_size < 10


def test_keys_that_are_only_described_are_keys(tmp_path: Path) -> None:
    """Before, jax was asked for the kind of a key that is none: "unexpected PRNG key type"."""
    keys = [jax.random.key(0), jax.random.split(jax.random.key(1, impl="rbg"), 3)]
    structs = [jax.ShapeDtypeStruct(key.shape, key.dtype) for key in keys]
    stored = write_values(structs, tmp_path / "values.bin", with_values=False)
    assert [dtype_of(leaf) for leaf in stored] == [key.dtype for key in keys]


def test_bytes_are_those_of_arrays() -> None:
    leaves = [jnp.ones((4, 4)), np.ones(2, np.float64), 3, jax.new_ref(jnp.ones(3))]
    assert bytes_of(leaves) == 64 + 16 + 12


def test_an_array_that_is_made_may_be_changed_without_another(tmp_path: Path) -> None:
    (one, other), _ = kept([np.ones(3), np.ones(3)], tmp_path)
    one[0] = 5
    np.testing.assert_array_equal(other, np.ones(3))
