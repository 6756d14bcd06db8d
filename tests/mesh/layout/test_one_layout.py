"""One layout: what a training script runs on, what is compiled ahead of time, what is priced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from automesh.errors import UsageError
from automesh.hardware.fabric.discover import attached_fabric
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.fabric.placement import Placement
from automesh.mesh.axes import MeshAxis
from automesh.mesh.config import MeshConfig
from automesh.mesh.granules import by_slice, granules_of
from automesh.mesh.layout.devices import create_mesh_for
from automesh.mesh.layout.rings import ring_of
from automesh.mesh.shape import HybridMeshShape
from automesh.program.absent.layout import lay_out
from automesh.program.nouns import Device
from automesh.program.script.build import build_on
from automesh.worker.messages import LayoutJob
from tests.hardware.fabric.test_discover import route
from tests.support.fakes.mesh_devices import nodes, slices

NAMES = ("dp", "fsdp", "tp")
# (devices, granules) -> the torus of one v5e slice.
TORUS = {
    (16, 1): (4, 4), (16, 2): (2, 4), (16, 4): (2, 2),
    (64, 1): (8, 8), (64, 2): (4, 8), (64, 4): (4, 4),
}  # fmt: skip


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a number as an ordered product."""
    if parts == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factorizations(number // first, parts - 1)
    ]


def splits(devices: int, granules: int) -> list[tuple[MeshAxis, ...]]:
    """All meshes of three axes over the granules and inside them."""
    return [
        tuple(
            MeshAxis(name=name, ici=ici, dcn=dcn)
            for name, ici, dcn in zip(NAMES, inside, across, strict=True)
        )
        for across in factorizations(granules, len(NAMES))
        for inside in factorizations(devices // granules, len(NAMES))
    ]


def listed(platform: str, devices: int, granules: int) -> list:
    if platform == "tpu":
        return slices("TPU v5 lite", TORUS[devices, granules], granules)
    return nodes(granules, devices // granules, platform=platform)


def described(devices) -> list[Device]:
    """The same devices as an inspection reports them."""
    return [
        Device(
            id=one.id,
            kind=one.device_kind,
            platform=one.platform,
            process_index=one.process_index,
            slice_index=getattr(one, "slice_index", 0),
            coords=tuple(getattr(one, "coords", ())),
        )
        for one in devices
    ]


def priced(axes, fabric: Fabric, layouts: Layouts, granules) -> np.ndarray:
    """Ids of the devices where the cost model takes them to be."""
    at = {}
    for number, granule in enumerate(granules):
        for index, device in enumerate(granule):
            place = (*device.coords, device.core_on_chip) if fabric.torus else (0, 0, 0, index)
            at[number, place] = device.id
    placement = Placement(axes, fabric, layouts)
    ids = [
        at[int(granule), tuple(place.tolist())]
        for granule, place in zip(placement.granule, placement.place, strict=True)
    ]
    return np.array(ids).reshape([axis.size for axis in axes])


def layouts_of(plans, fabric: Fabric, kind: str, platform: str) -> Layouts:
    shapes = tuple(sorted({tuple(axis.ici for axis in axes) for axes in plans}))
    return lay_out(
        LayoutJob(
            platform=platform,
            device_kind=kind,
            torus=fabric.torus,
            devices_per_chip=fabric.devices_per_chip or 1,
            shapes=shapes,
        )
    )


def ids_of(mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.id)(mesh.devices)


@pytest.mark.parametrize("granules", [1, 2, 4])
@pytest.mark.parametrize("number", [16, 64])
@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_run_time_ahead_of_time_and_cost_model_agree(platform, number, granules):
    """All factorizations over three axes; to run, the devices are listed in another order."""
    devices = listed(platform, number, granules)
    plans = splits(number, granules)
    fabric = attached_fabric(described(devices))
    layouts = layouts_of(plans, fabric, devices[0].device_kind, platform)
    assert not layouts.refused
    # Other than of chips with places, the order inside a granule is that of the list.
    mixed = devices[::-1] if platform == "tpu" else sorted(devices, key=lambda d: -d.process_index)

    def build(mesh):
        built.append(ids_of(mesh))
        return lambda x: x, (1.0,)

    for axes in plans:
        built = []
        ici, dcn = zip(*((axis.ici, axis.dcn) for axis in axes), strict=True)
        config = MeshConfig(mesh_shape=HybridMeshShape(ici, dcn), mesh_axis_names=NAMES)
        mesh = config.create_device_mesh(mixed)
        build_on(build, axes, devices=devices)
        assert mesh.axis_names == NAMES
        assert mesh.axis_types == (AxisType.Auto,) * 3
        assert mesh.devices.shape == tuple(axis.size for axis in axes)
        model = priced(axes, fabric, layouts, granules_of(devices))
        np.testing.assert_array_equal(ids_of(mesh), model)
        np.testing.assert_array_equal(built[0], model)


@pytest.mark.parametrize(
    ("sizes", "kind"), [((64, 4), "TPU v5 lite"), ((1, 32, 8), "TPU v6 lite"), ((64, 4), "TPU v4")]
)
def test_pods_agree_too(sizes, kind):
    """With the rings of `mesh.layout.rings`, on two slices, and without on another chip."""
    torus = (16, 16) if "lite" in kind else (4, 8, 8)
    devices = slices(kind, torus, 2)
    axes = tuple(
        MeshAxis(name=name, ici=ici, dcn=2 if index == 0 else 1)
        for index, (name, ici) in enumerate(zip(NAMES, sizes, strict=False))
    )
    fabric = attached_fabric(described(devices))
    layouts = layouts_of([axes], fabric, kind, "tpu")
    mesh = create_mesh_for(axes, devices=devices)
    model = priced(axes, fabric, layouts, granules_of(devices))
    np.testing.assert_array_equal(ids_of(mesh), model)


def far(one, other) -> int:
    """Links between two chips of a torus of 16 x 16."""
    return sum(min((a - b) % 16, (b - a) % 16) for a, b in zip(one.coords, other.coords))


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
@pytest.mark.parametrize("shape", [(64, 4), (32, 8), (1, 64, 1, 4), (32, 1, 8)])
def test_the_inner_axis_of_a_pod_is_a_ring(kind, shape):
    names = tuple("abcd"[: len(shape)])
    mesh = MeshConfig(mesh_shape=shape, mesh_axis_names=names).create_device_mesh(
        slices(kind, (16, 16), 1)
    )
    assert mesh.devices.shape == shape
    rings = mesh.devices.reshape(-1, shape[-1])
    assert len({device.id for device in rings.flat}) == 256
    for ring in rings:
        assert [far(a, b) for a, b in zip(ring, np.roll(ring, 1))] == [1] * len(ring)
    # Row by row: every group of the outer axis is a torus of its own, one chip of each block.
    block = (2, 2) if shape[-1] == 4 else (2, 4)
    for place in range(shape[-1]):
        column = np.array([device.coords[:2] for device in rings[:, place]])
        steps = [sorted(set((along - along.min()).tolist())) for along in column.T]
        assert sorted(map(len, steps)) == sorted(16 // size for size in block)
        assert all(len(set(np.diff(along).tolist())) == 1 for along in steps)


@pytest.mark.parametrize(("shape", "links", "hops"), [((64, 4), 2.0, 2.0), ((32, 8), 2.0, 4.0)])
def test_rings_are_priced_as_rings(shape, links, hops):
    """Two links of every chip serve its ring, which is passed half way round in each direction; a
    part of one dimension of the torus has the end of a line instead: one link, to the far end."""
    found = route("v5e:16x16", shape, "b")
    assert found[:3] == (shape[1], links, hops)


@pytest.mark.parametrize(
    ("kind", "torus", "sizes"),
    [
        ("TPU v5 lite", (16, 16), (4, 64)),  # The ring is the inner axis.
        ("TPU v5 lite", (16, 16), (2, 32, 4)),
        ("TPU v5p", (4, 8, 8), (64, 4)),
        ("TPU v5 lite", (8, 16), (32, 4)),
        ("TPU v5 lite", (16, 16), (256,)),
    ],
)
def test_other_meshes_are_laid_out_as_jax_does(kind, torus, sizes):
    devices = slices(kind, torus, 1)
    assert ring_of(sizes, devices) is None
    axes = [MeshAxis(name=name, ici=size) for name, size in zip("abc", sizes)]
    mine = create_mesh_for(axes, devices=devices)
    theirs = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    np.testing.assert_array_equal(mine.devices, theirs)


granule_counts = st.sampled_from([1, 2, 3, 4])


@settings(max_examples=40, deadline=None)
@given(st.data(), granule_counts, st.booleans())
def test_granules_lie_as_in_the_hybrid_meshes_of_jax(data, granules, sort):
    """Right shape, names and device order, for any legal mesh on any platform."""
    platform = data.draw(st.sampled_from(["tpu", "gpu", "cpu"]))
    each = data.draw(st.sampled_from([4, 8, 16]))
    devices = (
        slices("TPU v4", {4: (2, 2, 1), 8: (2, 2, 2), 16: (4, 4, 1)}[each], granules)
        if platform == "tpu"
        else nodes(granules, each, platform=platform)
    )
    order = data.draw(st.permutations(range(granules)))
    devices = [one for number in order for one in devices[number * each : (number + 1) * each]]
    ici = data.draw(st.sampled_from(factorizations(each, 3)))
    dcn = data.draw(st.sampled_from(factorizations(granules, 3)))
    axes = [MeshAxis(name=n, ici=i, dcn=d) for n, i, d in zip(NAMES, ici, dcn, strict=True)]
    mesh = create_mesh_for(axes, devices=devices, sort_granules=sort)
    expected = mesh_utils.create_hybrid_device_mesh(
        ici,
        dcn,
        devices,
        process_is_granule=not by_slice(devices),
        should_sort_granules_by_key=sort,
        allow_split_physical_axes=True,
    )
    assert mesh.axis_names == NAMES
    np.testing.assert_array_equal(mesh.devices, expected)


@pytest.mark.parametrize("kept", [(1,), (0, 2), (3, 1)])
def test_any_slices_of_a_job_make_a_mesh(kept):
    every = slices("TPU v5 lite", (2, 4), 4)
    chosen = [device for device in every if device.slice_index in kept]
    shape = HybridMeshShape((1, -1), (-1, 1))
    mesh = MeshConfig(mesh_shape=shape, mesh_axis_names=("dp", "tp")).create_device_mesh(chosen)
    rows = [[device.slice_index for device in row] for row in mesh.devices]
    assert rows == [[number] * 8 for number in sorted(kept)]


def test_axes_that_may_not_share_a_dimension_are_refused():
    devices = slices("TPU v4", (4, 4, 4), 1)
    axes = [MeshAxis(name="dp", ici=2), MeshAxis(name="tp", ici=32)]
    assert create_mesh_for(axes, devices=devices).devices.shape == (2, 32)
    with pytest.raises(UsageError, match="jax cannot lay mesh `dp:2,tp:32` out"):
        create_mesh_for(axes, devices=devices, allow_split_physical_axes=False)
    pod = slices("TPU v5 lite", (16, 16), 1)
    rings = [MeshAxis(name="dp", ici=64), MeshAxis(name="tp", ici=4)]
    with pytest.raises(UsageError, match="jax cannot lay mesh `dp:64,tp:4` out"):
        create_mesh_for(rings, devices=pod, allow_split_physical_axes=False)
