"""CPU meshes and contexts: this process' devices, restored afterwards."""

from __future__ import annotations

import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.layout.cpu import cpu_context, create_cpu_mesh, force_cpu
from tests.support.fakes.worlds import cpu_world, cpus, gpus, world


def test_a_cpu_mesh_has_all_devices_of_this_process():
    with cpu_world(8):
        mesh = create_cpu_mesh((2, -1), ("a", "b"))
        assert create_cpu_mesh((2, -1), ("a", "b")) is mesh
        assert dict(create_cpu_mesh().shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    assert mesh.devices.ravel().tolist() == cpus(8)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_accelerators_and_other_processes_are_left_alone():
    # What `jax.devices()` has is not looked at: on a pod that is all hosts' accelerators.
    with world(gpus(4, 8), processes=4), mock.patch.object(jax, "local_devices") as local:
        local.return_value = cpus(2)
        assert create_cpu_mesh().devices.ravel().tolist() == cpus(2)
    local.assert_called_with(backend="cpu")


def test_work_is_forced_onto_the_first_cpu_device_and_back():
    second = jax.devices()[1]
    with jax.default_device(second):
        with force_cpu() as device:
            assert device == jax.devices()[0]
            assert jnp.ones(2).devices() == {device}
        assert jnp.ones(2).devices() == {second}


def test_another_thread_is_not_forced():
    seen: list[set[object]] = []
    with jax.default_device(jax.devices()[1]), force_cpu():
        thread = threading.Thread(target=lambda: seen.append(jax.default_device.value))
        thread.start()
        thread.join()
        assert jax.config.jax_default_device == jax.devices()[0]
    assert seen == [None]


def test_a_context_puts_its_mesh_in_force():
    with cpu_world(8), cpu_context() as mesh:
        assert jax.sharding.get_mesh() is mesh
        split = jax.device_put(np.ones((8, 2)), PartitionSpec("fsdp"))
        total = jax.jit(jnp.sum)(split)
        with cpu_context() as inner:
            assert inner is mesh
        assert jax.sharding.get_mesh() is mesh
    assert split.addressable_data(0).shape == (1, 2)
    assert float(total) == 16
    assert jax.sharding.get_mesh().empty


def test_a_context_is_left_by_an_exception_too():
    before = jax.config.jax_default_device
    with pytest.raises(RuntimeError, match="mine"), cpu_context():
        raise RuntimeError("mine")
    assert jax.sharding.get_mesh().empty
    assert jax.config.jax_default_device == before


def test_a_context_inside_a_traced_function_is_refused():
    def inside(x):
        with cpu_context():
            return x

    with pytest.raises(UsageError, match="`cpu_context` cannot be entered here"):
        jax.jit(inside)(1.0)
    assert jax.sharding.get_mesh().empty


@pytest.mark.parametrize("enter", [force_cpu, cpu_context])
def test_a_jax_without_cpus_is_told(enter):
    refusal = RuntimeError("Unknown backend cpu")
    with (
        mock.patch.object(jax, "local_devices", side_effect=refusal),
        pytest.raises(UsageError, match="jax sees no CPU devices: Unknown backend cpu"),
        enter(),
    ):
        pass
