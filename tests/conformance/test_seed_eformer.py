"""The examples of eformer's documentation of mesh creation, with automesh's names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh import (
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    force_cpu,
    parse_mesh_from_string,
)
from tests.support.fakes.worlds import cpu_world


@pytest.fixture(autouse=True)
def _eight_devices():
    with cpu_world(8):
        yield


def test_a_mesh_of_two_axes_and_a_sharded_function():
    mesh = create_mesh(axis_dims=(2, 4), axis_names=("data", "model"))
    rows, columns = (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec(None, "model")),
    )
    left, right = jnp.ones((4, 8)), jnp.ones((8, 4))
    # `with mesh:` and `pjit` of the example are deprecated in jax.
    with jax.set_mesh(mesh):
        sharded = jax.jit(jnp.dot, in_shardings=(rows, columns), out_shardings=rows)
        product = sharded(left, right)
    assert product.sharding.spec == PartitionSpec("data")
    assert product.sum() == 8 * 16


def test_the_defaults_put_all_devices_on_fsdp():
    mesh = create_mesh()
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}


def test_a_mesh_from_a_string_in_both_forms():
    named = parse_mesh_from_string("dp:2,tp:4", ["dp", "tp"])
    assert dict(named.shape) == {"dp": 2, "tp": 4}
    positional = parse_mesh_from_string("2,4", ["data", "model"])
    assert dict(positional.shape) == {"data": 2, "model": 4}


@pytest.mark.parametrize("text", ["dp:2", "dp:2,xx:4", "2,4,1", "dp:2,tp:2,dp:2"])
def test_names_and_dimensions_that_do_not_match(text):
    with pytest.raises(ValueError):
        parse_mesh_from_string(text, ["dp", "tp"])


def test_the_mesh_of_one_host():
    assert calculate_host_mesh_shape((2, 4), total_devices=4, num_processes=2) == (1, 4)
    assert calculate_host_mesh_shape((2, 4)) == (2, 4)


def test_a_cpu_mesh_and_work_on_one_cpu():
    with cpu_context() as mesh:

        @jax.jit
        def double(x):
            return x * 2

        result = double(jnp.ones((4, 4)))
    assert mesh.size == 8
    assert result.sum() == 32
    assert {one.platform for one in result.devices()} == {"cpu"}


def test_the_device_that_is_forced_is_restored():
    before = jnp.ones(2).devices()
    with force_cpu() as cpu_device:
        result = jnp.sum(jnp.arange(4))
        assert result.devices() == {cpu_device}
        assert cpu_device.platform == "cpu"
    assert jnp.ones(2).devices() == before


def test_a_cpu_mesh_uses_all_cpu_devices():
    assert dict(create_cpu_mesh((2, -1), ("data", "model")).shape) == {"data": 2, "model": 4}


@pytest.mark.parametrize("use_jax", [False, True])
@pytest.mark.parametrize("types", ["explicit", AxisType.Explicit, ("auto", AxisType.Manual)])
def test_every_parameter(use_jax, types):
    mesh = create_mesh(
        axis_dims=(2, -1),
        axis_names=("dp", "tp"),
        dcn_mesh_dims=(1, 1),
        should_sort_granules_by_key=False,
        allow_split_physical_axes=False,
        backend="cpu",
        use_jax=use_jax,
        axis_types=types,
    )
    assert dict(mesh.shape) == {"dp": 2, "tp": 4}
    wanted = types if isinstance(types, tuple) else (types, types)
    assert [one.name.lower() for one in mesh.axis_types] == [
        getattr(one, "name", one).lower() for one in wanted
    ]
