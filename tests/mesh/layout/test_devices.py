"""Axes laid out on real CPU devices, and on stand-ins for TPU slices and GPU nodes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh.errors import UsageError, WrongType
from automesh.mesh.axes import MeshAxis, parse_mesh
from automesh.mesh.config import MeshConfig
from automesh.mesh.granules import granules_of
from automesh.mesh.layout.devices import create_mesh_for
from automesh.mesh.shape import HybridMeshShape

NAMES = ("dp", "fsdp", "tp")


@dataclass(frozen=True)
class FakeDevice:
    """What mesh_utils and Mesh look at."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def tpu_v4(num_slices=1):
    """Slices of 4 x 4 x 1 chips, hosts of four; the list alternates between slices."""
    return [
        FakeDevice(
            id=16 * s + 4 * x + y, platform="tpu", device_kind="TPU v4", process_index=4 * s + x,
            slice_index=s, coords=(x, y, 0),
        )
        for x in range(4)
        for y in range(4)
        for s in range(num_slices)
    ]  # fmt: skip


def gpu_nodes(nodes, each=8):
    return [
        FakeDevice(
            id=each * node + i, platform="gpu", device_kind="NVIDIA H100 80GB HBM3",
            process_index=node, slice_index=0,
        )
        for i in range(each)
        for node in range(nodes)
    ]  # fmt: skip


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_axes_are_laid_out_on_the_attached_devices():
    mesh = create_mesh_for(parse_mesh("dp:2,tp:4", NAMES), devices=jax.devices()[:8])
    assert mesh.shape == {"dp": 2, "fsdp": 1, "tp": 4}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec(("dp", "tp"))))
    assert array.sum() == 28


def test_a_smaller_mesh_takes_the_first_devices():
    assert ids(create_mesh_for(parse_mesh("dp:1", NAMES))).ravel().tolist() == [0]
    assert ids(create_mesh_for(parse_mesh("tp:4", NAMES))).ravel().tolist() == [0, 1, 2, 3]


def test_a_smaller_mesh_stays_in_the_first_granule():
    mesh = create_mesh_for(parse_mesh("dp:1", NAMES), devices=gpu_nodes(2))
    assert ids(mesh).ravel().tolist() == [0]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((), (AxisType.Auto,) * 3),
        (("explicit",), (AxisType.Explicit,) * 3),
        (("auto", "Explicit", " manual "), (AxisType.Auto, AxisType.Explicit, AxisType.Manual)),
    ],
)
def test_axis_types(wanted, expected):
    assert create_mesh_for(parse_mesh("dp:2", NAMES), axis_types=wanted).axis_types == expected


def test_a_torus_is_split_the_way_jax_does():
    # The ids that AXLearn and jax's mesh_utils give for 4 x 4 x 1 chips.
    mesh = create_mesh_for(parse_mesh("dp:2,tp:8", ("dp", "tp")), devices=tpu_v4())
    assert ids(mesh).tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_slices_lie_along_the_dcn_part():
    axes = parse_mesh("dcn.dp:2,fsdp:4,tp:4", NAMES)
    mesh = create_mesh_for(axes, devices=tpu_v4(num_slices=2))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.devices.shape == (2, 4, 4)
    assert (slices[0] == 0).all()
    assert (slices[1] == 1).all()


def test_a_dcn_part_is_the_outer_part_of_its_axis():
    axes = [MeshAxis(name="dp", ici=2, dcn=2), MeshAxis(name="tp", ici=4)]
    mesh = create_mesh_for(axes, devices=gpu_nodes(2))
    assert ids(mesh).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_job_on_one_node_of_two_has_one_granule():
    second = [device for device in gpu_nodes(2) if device.process_index == 1]
    mesh = create_mesh_for(parse_mesh("fsdp:8", NAMES), devices=second)
    assert ids(mesh).ravel().tolist() == list(range(8, 16))


def test_hosts_of_one_tpu_slice_are_one_granule():
    assert len(granules_of(tpu_v4())) == 1
    assert [len(granule) for granule in granules_of(tpu_v4(num_slices=2))] == [16, 16]


@pytest.mark.parametrize(
    ("text", "devices", "said"),
    [
        ("dcn.dp:2,tp:4", None, "spans 2 granules, but the devices form 1"),
        ("tp:32", None, "mesh `tp:32` needs 32 devices, but there are 16"),
        ("fsdp:16", gpu_nodes(2), "mesh `fsdp:16` spans 1 granules, but the devices form 2"),
        ("tp:8", gpu_nodes(2), "mesh `tp:8` spans 1 granules, but the devices form 2"),
        ("dcn.dp:2,tp:4", gpu_nodes(2), "needs 4 devices in each granule, but there are 8"),
        ("dp:2", gpu_nodes(2)[:3], "must have the same number of devices, got [1, 2]"),
        ("dp:2", [], "needs at least one device, got none"),
        ("dp:2", [*gpu_nodes(1), *tpu_v4()], "cannot mix devices of several platforms, got"),
        ("tp:5", tpu_v4(), "jax cannot lay mesh `tp:5` out on these devices"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused(text, devices, said):
    with pytest.raises(UsageError) as caught:
        create_mesh_for(parse_mesh(text, NAMES), devices=devices)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("devices", "kind", "said"),
    [
        (8, WrongType, "`devices` must be a sequence of jax devices, got an int: 8"),
        ("cpu", WrongType, "`devices` must be a sequence of jax devices, got a str: 'c'"),
        (jax.devices()[0], WrongType, "got one device: "),
        ([jax.devices()], WrongType, "must be a sequence of jax devices, got a list"),
        (jax.devices()[:1] * 2, UsageError, "every device once, got cpu:0 twice among 2"),
        (gpu_nodes(2)[:3], UsageError, "got [1, 2]: process 1 has 1"),
        (tpu_v4(2)[:3], UsageError, "got [1, 2]: slice 1 has 1"),
    ],
)
def test_devices_that_are_none_are_refused(devices, kind, said):
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("data",))
    for use in (config.create_device_mesh, lambda devices: config.explain(devices=devices)):
        with pytest.raises(kind) as caught:
            use(devices)
        assert said in caught.value.message


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (("auto", "auto"), "got 2 axis types ['auto', 'auto'] for the 3 axes"),
        (("automatic",), "`automatic` is not an axis type; use auto, explicit, manual"),
    ],
)
def test_wrong_axis_types_are_refused(types, said):
    with pytest.raises(UsageError) as caught:
        create_mesh_for(parse_mesh("dp:2", NAMES), axis_types=types)
    assert said in caught.value.message


def test_repeated_axes_are_refused():
    with pytest.raises(UsageError, match="distinct axis names"):
        create_mesh_for([MeshAxis(name="a", ici=2), MeshAxis(name="a", ici=4)])


def test_a_config_makes_its_mesh_on_all_devices():
    config = MeshConfig(mesh_shape=(2, -1), mesh_axis_names=("data", "model"))
    assert config.create_device_mesh().shape == {"data": 2, "model": 8}
    assert config.create_device_mesh(jax.devices()[:4]).shape == {"data": 2, "model": 2}
    assert (config.hosts, config.host_id) == (1, 0)


def test_a_config_spans_granules_with_its_dcn_part():
    shape = HybridMeshShape((1, -1), (-1, 1))
    config = MeshConfig(mesh_shape=shape, mesh_axis_names=("data", "model"))
    assert config.create_device_mesh(gpu_nodes(4)).shape == {"data": 4, "model": 8}


def test_a_config_never_leaves_devices_idle():
    config = MeshConfig(mesh_shape=(2, 2), mesh_axis_names=("data", "model"))
    with pytest.raises(UsageError, match="multiply to 4, but there are 16 devices"):
        config.create_device_mesh()
