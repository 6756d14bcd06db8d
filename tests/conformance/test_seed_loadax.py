"""The examples of Loadax's documentation of meshes, with automesh's names."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import automesh
from automesh import HybridMeshShape, MeshConfig
from tests.support.fakes.worlds import gpus, granule_grid, tpus, world

NAMES = ("pipeline", "data", "model")


def slabs(mesh):
    """The indices of the nodes along the axes of the mesh."""
    return granule_grid(mesh.devices).tolist()


def test_pure_fsdp_on_a_v4_8():
    shape = HybridMeshShape(ici_mesh_shape=(1, 4), dcn_mesh_shape=(1, 1))
    config = MeshConfig(mesh_shape=shape, mesh_axis_names=("data", "model"))
    mesh = config.create_device_mesh(tpus("TPU v4", (2, 2, 1)))
    assert dict(mesh.shape) == {"data": 1, "model": 4}


def test_data_parallelism_over_two_h100_nodes_and_fsdp_within():
    shape = HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(2, 1))
    config = MeshConfig(mesh_shape=shape, mesh_axis_names=("data", "model"))
    mesh = config.create_device_mesh(gpus(2, 8))
    assert dict(mesh.shape) == {"data": 2, "model": 8}
    assert slabs(mesh) == [[0] * 8, [1] * 8]


@pytest.mark.parametrize(
    ("shape", "by_node"),
    [
        # Breaks the "data" axis across DCN: dcn (1, 2, 1), ici (1, 1, 8).
        ((1, 2, 8), [[[0] * 8, [1] * 8]]),
        # Breaks along the "pipeline" axis: dcn (2, 1, 1), ici (1, 1, 8).
        ((2, 1, 8), [[[0] * 8], [[1] * 8]]),
    ],
)
def test_a_flat_shape_spans_nodes_with_its_first_axis_that_is_not_1(shape, by_node):
    mesh = MeshConfig(mesh_shape=shape, mesh_axis_names=NAMES).create_device_mesh(gpus(2, 8))
    assert mesh.devices.shape == shape
    assert slabs(mesh) == by_node


def test_all_axes_singletons_are_a_single_granule():
    config = MeshConfig(mesh_shape=(1, 1, 1), mesh_axis_names=NAMES)
    assert config.create_device_mesh(gpus(1, 1)).devices.shape == (1, 1, 1)


def test_each_member_of_a_hybrid_shape_has_a_size_for_each_axis():
    with pytest.raises(ValueError, match="as many ICI sizes as DCN sizes"):
        HybridMeshShape((1, 8), (2, 1, 1))
    with pytest.raises(ValueError, match="3 axes"):
        MeshConfig(mesh_shape=HybridMeshShape((1, 8), (2, 1)), mesh_axis_names=NAMES)


def test_rules_override_the_default_depending_on_the_platform():
    config = MeshConfig(
        mesh_shape=(-1, 1, 1),
        mesh_axis_names=NAMES,
        batch_axis_names="data",
        mesh_rules=[  # pyright: ignore[reportArgumentType]
            ("tpu-v4-(128|256)", (1, 1, -1)),
            ("gpu-p4de.24xlarge-32", (1, -1, 8)),
            ("gpu-.*", (1, 1, -1)),
        ],
    )
    nodes = gpus(4, 8)
    mesh = config.create_device_mesh(nodes, selector="gpu-p4de.24xlarge-32")
    assert dict(mesh.shape) == {"pipeline": 1, "data": 4, "model": 8}
    # If no rule matches, the default mesh configuration is used.
    assert dict(config.create_device_mesh(nodes, selector="neuron").shape) == {
        "pipeline": 32,
        "data": 1,
        "model": 1,
    }
    assert config.batch_axis_names == ("data",)


def test_hosts_and_host_id_are_those_of_jax():
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("data",))
    assert (config.hosts, config.host_id) == (jax.process_count(), jax.process_index()) == (1, 0)
    with world(gpus(4, 8), processes=4):
        assert (config.hosts, config.host_id) == (4, 0)


def test_the_default_devices_are_all():
    config = MeshConfig(mesh_shape=(2, -1), mesh_axis_names=("data", "model"))
    assert list(config.create_device_mesh().devices.ravel()) == jax.devices()


def test_a_mesh_is_discovered_for_a_strategy():
    with world(gpus(2, 8), processes=2):
        ddp = automesh.make_ddp_mesh_config()
        fsdp = automesh.make_fsdp_mesh_config(mesh_axis_names=("data", "model"))
        assert ddp.mesh_shape == HybridMeshShape((8,), (2,))
        assert fsdp.mesh_shape == HybridMeshShape((1, 8), (2, 1))
        assert np.prod(fsdp.create_device_mesh().devices.shape) == 16
