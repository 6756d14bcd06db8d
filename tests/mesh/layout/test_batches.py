"""Batches between host and devices; with several processes: tests/e2e/test_jax_processes.py."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.layout.batches import (
    DataPartitionType,
    global_to_host_array,
    host_to_global_device_array,
    input_partition_spec,
)
from automesh.mesh.layout.create import mesh_on

AXES = ("data", "fsdp", "model")


def mesh_of(*sizes):
    return mesh_on(jax.devices()[: math.prod(sizes)], sizes, AXES[: len(sizes)])


def test_rows_are_split_over_all_axes_or_those_named():
    mesh = mesh_of(2, 2, 2)
    assert input_partition_spec(mesh=mesh) == PartitionSpec(AXES)
    with jax.set_mesh(mesh):
        assert input_partition_spec() == PartitionSpec(AXES)
        assert input_partition_spec(batch_axis_names="fsdp") == PartitionSpec("fsdp")
        assert input_partition_spec(batch_axis_names=["data", "fsdp"]) == PartitionSpec(AXES[:2])
    with pytest.warns(DeprecationWarning, match="with jax.set_mesh"):
        mesh.__enter__()
    try:
        assert input_partition_spec() == PartitionSpec(AXES)
    finally:
        mesh.__exit__(None, None, None)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3).filter(
        lambda s: math.prod(s) <= 16
    ),
    st.integers(1, 3),
    st.sampled_from([(), (3,), (2, 1)]),
    st.sets(st.sampled_from(AXES)),
)
def test_what_is_placed_comes_back(sizes, each, rest, batch_axes):
    mesh = mesh_of(*sizes)
    named = [name for name in AXES if name in batch_axes] or None
    rows = each * math.prod(mesh.shape[name] for name in named or AXES)
    array = np.arange(rows * math.prod(rest), dtype=np.float32).reshape(rows, *rest)
    placed = host_to_global_device_array(array, mesh=mesh, batch_axis_names=named)
    assert placed.shape == array.shape
    assert placed.addressable_data(0).shape == (each, *rest)
    assert (np.asarray(placed) == array).all()
    assert (global_to_host_array(placed) == array).all()
    copied = host_to_global_device_array(array, mesh=mesh, partition=DataPartitionType.REPLICATED)
    assert copied.is_fully_replicated
    back = global_to_host_array(copied, partition=DataPartitionType.REPLICATED)
    assert (back == array).all()
    # Of an array that every device holds, each row comes once.
    assert (global_to_host_array(copied) == array).all()


def test_a_tree_keeps_its_structure_and_types():
    tree = {
        "tokens": np.arange(8),
        "weights": [jnp.ones((8, 2), jnp.bfloat16), np.ones((16,), bool)],
        "nothing": None,
    }
    placed = host_to_global_device_array(tree, mesh=mesh_of(4, 2))
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    assert placed["tokens"].dtype == jnp.int32  # As everywhere in jax without 64 bits.
    assert [leaf.dtype for leaf in placed["weights"]] == [jnp.bfloat16, jnp.bool_]
    assert global_to_host_array(placed)["weights"][0].dtype == jnp.bfloat16
    assert placed["tokens"].sharding == NamedSharding(
        mesh_of(4, 2), PartitionSpec(("data", "fsdp"))
    )


def test_explicit_axes_take_batches_too():
    mesh = mesh_on(jax.devices()[:4], (2, 2), AXES[:2], axis_types="explicit")
    placed = host_to_global_device_array(np.arange(8), mesh=mesh, batch_axis_names="data")
    assert jax.typeof(placed).sharding.spec == PartitionSpec("data")
    assert global_to_host_array(placed).tolist() == list(range(8))


def test_a_scalar_is_replicated():
    placed = host_to_global_device_array(
        {"step": 3}, mesh=mesh_of(4), partition=DataPartitionType.REPLICATED
    )
    assert global_to_host_array(placed, partition=DataPartitionType.REPLICATED)["step"] == 3


@pytest.mark.parametrize(
    ("batch", "axes", "said"),
    [
        ({"x": np.ones((6, 2))}, None, "leaf `['x']` of the batch has 6 rows of this host, which "),
        ({"x": np.ones((0, 2))}, None, "has 0 rows of this host"),
        ([np.ones(8), 3.0], None, "leaf `[1]` of the batch is a scalar"),
        (np.ones(3), "data", "leaf `batch` of the batch has 3 rows"),
        (np.ones(8), "modle", "batch axis `modle` is not an axis of the mesh; it has data, fsdp"),
        (np.ones(8), ("data", "data"), "batch axes must be distinct, got ['data', 'data']"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(batch, axes, said):
    with pytest.raises(UsageError) as caught:
        host_to_global_device_array(batch, mesh=mesh_of(2, 2), batch_axis_names=axes)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ("text", "leaf `['x']` of the batch is a str, not an array of numbers"),
        (object(), "is an object, not an array"),
        (np.array(["a", "b"]), "is a ndarray, not an array of numbers"),
        (jax.random.key(0), "not an array of numbers in host memory"),
    ],
)
def test_leaves_that_are_no_numbers_are_refused(leaf, said):
    with pytest.raises(TypeError) as caught:
        host_to_global_device_array({"x": leaf}, mesh=mesh_of(2))
    assert said in str(caught.value)


def test_without_a_mesh_nothing_is_placed():
    for call in (input_partition_spec, lambda: host_to_global_device_array(np.ones(8))):
        with pytest.raises(UsageError, match="needs a mesh, and none is in force"):
            call()
    with pytest.raises(TypeError, match=r"`mesh` must be a jax\.sharding\.Mesh, got a str"):
        host_to_global_device_array(np.ones(8), mesh="data")  # pyright: ignore[reportArgumentType]


def test_what_is_not_split_by_rows_is_refused():
    mesh = mesh_of(2, 2)
    columns = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, PartitionSpec(None, "data")))
    rows = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, PartitionSpec("data")))
    for call, said in (
        (
            lambda: global_to_host_array({"x": columns}),
            "leaf `['x']` of shape (4, 4) is split along",
        ),
        (lambda: global_to_host_array(jnp.ones(())), "leaf `batch` is a scalar"),
        (
            lambda: global_to_host_array(rows, partition=DataPartitionType.REPLICATED),
            "is split, not replicated",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert said in caught.value.message


def test_arguments_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match="`partition` must be a DataPartitionType, got a str"):
        host_to_global_device_array(np.ones(8), mesh=mesh_of(2), partition="full")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"leaf `batch` is a ndarray, not a jax\.Array"):
        global_to_host_array(np.ones(8))
    for axes in (5, ["data", 5]):
        with pytest.raises(TypeError, match=r"`batch_axis_names` must be .*, got an int: 5"):
            input_partition_spec(mesh=mesh_of(2), batch_axis_names=axes)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap])
def test_inside_a_transformed_function_nothing_moves(wrap):
    place = wrap(lambda x: host_to_global_device_array({"x": x}, mesh=mesh_of(2)))
    fetch = wrap(lambda x: global_to_host_array({"x": x}))
    for call, name in ((place, "host_to_global_device_array"), (fetch, "global_to_host_array")):
        with pytest.raises(TypeError, match=rf"leaf `\['x'\]`.* is traced: `{name}` moves data"):
            call(np.ones((8, 2)))
