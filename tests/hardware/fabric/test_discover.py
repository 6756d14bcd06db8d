"""Where jax's mesh code puts mesh axes, and what links they have there."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils

from automesh.errors import AutomeshError, UsageError
from automesh.hardware import parse_target
from automesh.hardware.fabric.discover import attached_fabric, fabric_of
from automesh.hardware.fabric.fabric import AxisSpan, Layouts
from automesh.hardware.fabric.routes import routes
from automesh.hardware.fabric.torus import (
    both_ways,
    reach,
    reach_of_rings,
    ring_along,
    shrunk,
)
from automesh.mesh.axes import MeshAxis
from automesh.mesh.layout.devices import create_mesh_for
from automesh.mesh.plan_arrays import Batch
from automesh.program.absent.layout import fake_devices, lay_out, spans_of
from automesh.program.nouns import Device
from automesh.worker.handlers.jobs import handle
from automesh.worker.messages import LayoutJob
from automesh.worker.protocol import answer_message, job_message, read_job, read_result

NAMES = ("dp", "fsdp", "tp")
X, Y, Z, CORE = 0, 1, 2, -1


def layouts(name, *shapes):
    absent = parse_target(name, {}).absent
    job = LayoutJob(
        platform="tpu",
        device_kind=absent.device_kind,
        torus=absent.fabric.torus,
        devices_per_chip=absent.fabric.devices_per_chip,
        shapes=shapes,
    )
    return absent.fabric, lay_out(job)


def route(name, shape, *axes):
    """(devices in a group, links in one direction that serve one device, hops) of one shape."""
    fabric, made = layouts(name, shape)
    names = tuple("abcde"[: len(shape)])
    batch = Batch(names=names, ici=np.array([shape]), dcn=np.ones((1, len(shape)), np.int64))
    found = routes(fabric, made, batch, axes)
    links = round(float(found.ici_bytes_per_s[0] / fabric.chip.link_bytes_per_s), 9)
    return int(found.ici_size[0]), links, found.ici_hops[0], found


def span(dimension, extent, stride=1):
    return AxisSpan(dimension=dimension, extent=extent, stride=stride)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # Whole dimensions where there are any, the last axis served first.
        ("v5e:4x4", (4, 4), ([span(Y, 4)], [span(X, 4)])),
        ("v5e:4x4", (16, 1), ([span(X, 4), span(Y, 4)], [])),
        # 8 = x and half of y: its neighbours stay neighbours, the other axis steps over them.
        ("v5e:4x4", (2, 8), ([span(Y, 2, 2)], [span(X, 4), span(Y, 2)])),
        ("v5e:4x4", (8, 2), ([span(X, 2, 2), span(Y, 4)], [span(X, 2)])),
        ("v5p:4x4x8", (8, 4, 4), ([span(Z, 8)], [span(Y, 4)], [span(X, 4)])),
        ("v5p:4x4x8", (8, 16), ([span(Z, 8)], [span(X, 4), span(Y, 4)])),
        # jax takes the larger whole dimensions first: x and z, so that y is cut.
        ("v5p:4x4x8", (2, 64), ([span(Y, 2, 2)], [span(X, 4), span(Y, 2), span(Z, 8)])),
        ("v5p:4x4x8", (16, 8), ([span(X, 4), span(Y, 4)], [span(Z, 8)])),
        # The cores of a chip are one more dimension of Ironwood.
        ("7x:4x4x4", (64, 2), ([span(X, 4), span(Y, 4), span(Z, 4)], [span(CORE, 2)])),
    ],
)  # fmt: skip
def test_axes_of_known_meshes(name, shape, expected):
    _, made = layouts(name, shape)
    assert [sorted(each, key=str) for each in made.spans[0]] == [
        sorted(each, key=str) for each in expected
    ]
    assert made.shapes == (shape,)
    assert not made.crooked + made.refused


@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:4x4x8", "7x:2x2x4", "v4:2x2x2", "v6e:2x4"])
def test_layouts_are_those_of_real_meshes(name):
    """What is read off is compared with the mesh that the same devices give, device by device."""
    absent = parse_target(name, {}).absent
    fabric = absent.fabric
    devices = fake_devices(absent.device_kind, fabric.torus, fabric.devices_per_chip)
    shapes = [
        shape
        for shape in itertools.product((1, 2, 4, 8, 16, 32, 64, 128), repeat=3)
        if math.prod(shape) == len(devices)
    ]
    _, made = layouts(name, *shapes)
    crooked = {one.shape for one in made.crooked}
    for shape, spans in zip(made.shapes, made.spans, strict=True):
        axes = [MeshAxis(name=axis, ici=size) for axis, size in zip(NAMES, shape, strict=True)]
        mesh = create_mesh_for(axes, devices=devices).devices
        places = np.array([(*device.coords, device.core_on_chip) for device in mesh.flat])
        places = places.reshape(*shape, 4)
        assert (spans_of(places) is None) == (shape in crooked)
        if shape in crooked:
            continue
        for axis, along in enumerate(spans):
            line = np.moveaxis(places, axis, 0).reshape(shape[axis], -1, 4)[:, -1]
            offsets = {tuple(at) for at in line - line.min(axis=0)}
            steps = [[0], [0], [0], [0]]
            for one in along:
                steps[one.dimension] = [one.stride * i for i in range(one.extent)]
            assert offsets == set(itertools.product(*steps))


def test_ones_change_nothing():
    shapes = ((2, 8, 1, 1), (1, 2, 1, 8), (2, 1, 8, 1))
    _, made = layouts("v6e:4x4", *shapes)
    assert len({tuple(each for each in spans if each) for spans in made.spans}) == 1


def test_jax_winds_small_slices_into_a_ring():
    # 2x2 chips as 0, 1, 3, 2: pairs along the first axis are diagonals, two hops apart.
    assert route("v5e:2x2", (2, 2), "a")[:3] == (2, 1.0, 2.0)
    assert route("v5e:2x2", (2, 2), "b")[:3] == (2, 1.0, 1.0)
    assert route("v5e:2x2", (2, 2), "a", "b")[:3] == (4, 2.0, 2.0)


def refuse_two():
    """Of jax, the function that lays a mesh out, as it was in 0.10 for one shape."""
    create = mesh_utils.create_device_mesh

    def create_device_mesh(mesh_shape, *args, **kwargs):
        if tuple(mesh_shape) == (2, 224):
            raise NotImplementedError("Failed to find assignment for logical_axis_index 0")
        return create(mesh_shape, *args, **kwargs)

    return create_device_mesh


def test_a_shape_that_jax_cannot_lay_out_is_refused_with_its_reason(monkeypatch):
    # 28 chips along a dimension: jax 0.10 does not find the 2 in it, and jax 0.12 does.
    if not layouts("v5p:4x4x28", (2, 224))[1].refused:
        assert jax.__version_info__ > (0, 10, 2)
        monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse_two())
    fabric, made = layouts("v5p:4x4x28", (2, 224), (28, 16))
    (shape, reason), *others = made.refused
    assert (shape, others) == ((2, 224), [])
    assert "jax cannot lay mesh `2x224` out" in reason
    assert made.shapes == ((28, 16),)
    names, one = ("a", "b"), np.ones((2, 2), np.int64)
    batch = Batch(names=names, ici=np.array([(2, 224), (28, 16)]), dcn=one)
    found = routes(fabric, made, batch, ("a",))
    assert np.isnan(found.ici_bytes_per_s).tolist() == [True, False]
    unasked = Batch(names=names, ici=np.array([(56, 8), (28, 16)]), dcn=one)
    with pytest.raises(AutomeshError, match="no layout of the shape 56x8 was asked for"):
        routes(fabric, made, unasked, ("a",))


def test_one_chip_is_laid_out_too():
    _, made = layouts("v5e:1x1", (1, 1))
    assert (made.shapes, made.refused) == (((1, 1),), ())


def test_without_a_torus_axes_lie_nowhere():
    job = LayoutJob(
        platform="cpu", device_kind="cpu", torus=(), devices_per_chip=1, shapes=((2, 4),)
    )
    assert handle(job, lambda event: {}) == Layouts(shapes=((2, 4),), spans=(((), ()),))


def test_a_worker_can_be_asked():
    shapes = ((2, 2), (4, 1), (3, 1))
    job = LayoutJob(
        platform="tpu", device_kind="TPU v5 lite", torus=(2, 2), devices_per_chip=1, shapes=shapes
    )
    answer = handle(read_job(job_message(job, "layout")), lambda event: {})
    assert read_result(job, answer_message(job, answer)) == answer == lay_out(job)
    assert {one.shape for one in answer.crooked} == {(2, 2)}
    assert [shape for shape, _ in answer.refused] == [(3, 1)]


def test_links_of_known_groups():
    # A line sends one way, a ring whose ends are linked both ways, several dimensions add up.
    assert route("v5e:4x4", (4, 4), "a")[:3] == (4, 1.0, 3.0)
    assert route("v5e:4x4", (16, 1), "a")[:3] == (16, 2.0, 6.0)
    assert route("v5e:16x16", (16, 16), "a")[:3] == (16, 2.0, 8.0)
    assert route("v5e:16x16", (16, 16), "a", "b")[:3] == (256, 4.0, 16.0)
    # Two groups of every second chip share the links of a line.
    assert route("v5e:4x4", (2, 8), "a")[:3] == (2, 0.5, 2.0)
    # Four chips of sixteen do not reach round: one way; the other four lie between each other.
    assert route("v5e:16x16", (16, 4, 4), "c")[:3] == (4, 1.0, 3.0)
    assert route("v5e:16x16", (16, 4, 4), "b")[:3] == (4, 2.0 / 4, 8.0)
    # Together they are the ring again.
    assert route("v5e:16x16", (16, 4, 4), "b", "c")[:3] == (16, 2.0, 8.0)
    # The first and last of three axes leave a gap: {0 .. 3, 8 .. 11} of the 16 chips along x.
    assert route("v5e:16x16", (16, 2, 2, 4), "b", "d")[:3] == (8, 2.0 / 2, 8.0)
    assert route("v5p:4x4x8", (4, 4, 8), "a", "b", "c")[:3] == (128, 6.0, 8.0)


def test_an_all_to_all_is_held_up_by_the_middle_of_its_dimension():
    # A quarter of the array crosses the middle of a line of 4, a sixteenth each of the lines of a
    # square (scaling-book, "Sharded matrices": a quarter of an all-gather on a ring).
    for name, shape, array in [("v5e:4x4", (4, 4), 1 / 4), ("v5e:16x16", (16, 16), 1 / 8)]:
        size, links, _, found = route(name, shape, "a")
        sent = (size - 1) / size**2
        assert sent * found.ici_transit[0] / links == pytest.approx(array)
    size, links, _, found = route("v5e:4x4", (16, 1), "a")
    assert (size - 1) / size**2 * found.ici_transit[0] / links == pytest.approx(1 / 16)


def test_two_devices_of_a_chip_share_its_links():
    # In units of half a chip's link: one core's groups have half of each link they use ...
    size, links, _, _ = route("7x:4x4x4", (2, 4, 4, 4), "b")
    assert (size, links) == (4, 2.0)
    # ... a group of both cores has all of it: 3/4 of the array crosses, 7/8 is sent.
    size, links, _, _ = route("7x:2x2x1", (8,), "a")
    assert links == pytest.approx(2 * 2 * (7 / 8) / (3 / 4))
    # The cores of one chip need no link.
    size, links, hops, _ = route("7x:4x4x4", (64, 2), "b")
    assert (size, hops) == (2, 0.0)
    assert links > 4


@given(
    st.sampled_from([4, 8, 16]),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    st.data(),
)
def test_formulas_agree_with_counting_links(size, extents, data):
    """One dimension cut among axes: the formulas against messages followed link by link."""
    extents = [one for one in extents if one > 1]
    while math.prod(extents) > size:
        extents.pop()
    wraps = data.draw(st.booleans())
    strides = [math.prod(extents[i + 1 :]) for i in range(len(extents))]
    if not extents:
        return
    chosen = data.draw(st.sets(st.integers(0, len(extents) - 1), min_size=1))
    taken = sorted(chosen)
    line = np.arange(math.prod(extents)).reshape(extents)
    groups = np.moveaxis(line, taken, range(-len(taken), 0)).reshape(
        -1, math.prod(extents[i] for i in taken)
    )
    # A dimension may hold several blocks side by side.
    blocks = range(0, size, math.prod(extents))
    places = np.zeros((len(groups) * len(blocks), groups.shape[1], 4), np.int64)
    places[:, :, 0] = np.concatenate([groups + start for start in blocks])
    counted = reach_of_rings(list(places), (size,), (wraps,))
    spans = tuple(span(0, extents[i], strides[i]) for i in taken)
    found = reach(spans, (size,), (wraps,))
    around = wraps and max(one.extent * one.stride for one in spans) == size
    assert found.chips == counted.chips
    assert found.hops == counted.hops or (around and found.chips == 2)
    if not around:
        assert found.links == pytest.approx(counted.links)
        assert found.spread == pytest.approx(counted.spread)
    elif found.chips > 2 and len(taken) == 1:
        # Two members see each other both ways round; messages here only take one of them.
        assert found.links == pytest.approx(counted.links)


@given(st.sampled_from(["v5e:16x16", "v5p:4x4x8", "7x:4x4x4", "v5e:2x4", "7x:2x2x1"]), st.data())
def test_routes_of_many_meshes_are_those_of_each(name, data):
    absent = parse_target(name, {}).absent
    total = absent.num_devices
    sizes = st.permutations([2] * int(math.log2(total))).map(
        lambda twos: tuple(math.prod(twos[i::3]) for i in range(3))
    )
    shapes = data.draw(st.lists(sizes, min_size=1, max_size=4))
    fabric, made = layouts(name, *dict.fromkeys(shapes))
    batch = Batch(names=NAMES, ici=np.array(shapes), dcn=np.ones((len(shapes), 3), np.int64))
    axes = tuple(data.draw(st.sets(st.sampled_from(NAMES))))
    together = routes(fabric, made, batch, axes)
    for row in range(len(shapes)):
        one = Batch(names=NAMES, ici=batch.ici[[row]], dcn=batch.dcn[[row]])
        alone = routes(fabric, made, one, axes)
        for field in ("ici_size", "ici_bytes_per_s", "ici_hops", "ici_transit", "ici_step_share"):
            assert getattr(together, field)[row] == getattr(alone, field)[0]
    alone = together.ici_size == 1
    assert np.all(np.isinf(together.ici_bytes_per_s) == alone)
    assert np.all((together.ici_step_share > 0) & (together.ici_step_share <= 1))


def test_many_shapes_are_laid_out_at_once():
    shapes = [
        shape
        for shape in itertools.product((1, 2, 4, 8, 16, 32, 64, 128), repeat=5)
        if math.prod(shape) == 128
    ]
    assert len(shapes) == 330
    _, made = layouts("v5p:4x4x8", *shapes)
    assert set(made.shapes) == set(shapes)
    assert not made.crooked + made.refused


def device(number, coords=(), kind="cpu", platform="cpu", process=0, slice_index=0):
    return Device(
        id=number, platform=platform, kind=kind, process_index=process,
        slice_index=slice_index, coords=coords,
    )  # fmt: skip


def test_the_fabric_of_attached_devices():
    tpus = [
        device(i, kind="TPU v5 lite", platform="tpu", slice_index=s, coords=(i % 4, i // 4, 0))
        for s in range(2)
        for i in range(16)
    ]
    fabric = attached_fabric(tpus)
    assert (fabric.kind, fabric.torus, fabric.wraps) == ("torus", (4, 4), (False, False))
    assert (fabric.num_granules, fabric.granule_devices, fabric.devices_per_chip) == (2, 16, 1)
    ironwood = [
        device(i, kind="TPU7x", platform="tpu", coords=(i // 2 % 2, i // 4, 0)) for i in range(8)
    ]
    fabric = attached_fabric(ironwood)
    assert (fabric.torus, fabric.devices_per_chip, fabric.num_devices) == ((2, 2, 1), 2, 8)
    gpus = [device(i, kind="NVIDIA H200", platform="gpu", process=i // 8) for i in range(16)]
    fabric = attached_fabric(gpus)
    assert (fabric.kind, fabric.num_granules, fabric.chip.slug) == ("switch", 2, "h200")
    fabric = attached_fabric([device(i) for i in range(8)])
    assert (fabric.kind, fabric.num_granules, fabric.granule_devices) == ("shared", 1, 8)


def test_an_attached_slice_has_the_fabric_of_its_name():
    for name in ("v5e:4x8", "v5p:4x4x4", "7x:2x2x2", "v6e:8x16*2"):
        target = parse_target(name, {})
        absent = target.absent
        chips = fake_devices(
            absent.device_kind, absent.fabric.torus, absent.fabric.devices_per_chip
        )
        devices = [
            device(one.id, kind=one.device_kind, platform="tpu", slice_index=s, coords=one.coords)
            for s in range(absent.fabric.num_granules)
            for one in chips
        ]
        assert attached_fabric(devices) == fabric_of(target, ()) == absent.fabric


def test_slices_that_cannot_be_told_apart_are_refused():
    with pytest.raises(UsageError, match="do not say where they are"):
        attached_fabric([device(0, kind="TPU v4", platform="tpu")])
    with pytest.raises(UsageError, match="3 devices do not fill a box of 2x2x1 chips"):
        attached_fabric(
            [
                device(i, kind="TPU v4", platform="tpu", coords=at)
                for i, at in enumerate([(0, 0, 0), (1, 0, 0), (0, 1, 0)])
            ]
        )


def test_attached_cpu_devices_are_laid_out_in_order():
    fabric = attached_fabric(
        [device(one.id, platform=one.platform, kind=one.device_kind) for one in jax.devices()]
    )
    shape = (2, fabric.num_devices // 2)
    batch = Batch(names=("a", "b"), ici=np.array([shape]), dcn=np.ones((1, 2), np.int64))
    found = routes(fabric, Layouts(shapes=(), spans=()), batch, ("a",))
    assert found.ici_size.tolist() == [2]
    assert found.ici_bytes_per_s.tolist() == [fabric.chip.link_bytes_per_s]


@st.composite
def spans_of_a_torus(
    draw: st.DrawFn,
) -> tuple[tuple[AxisSpan, ...], tuple[int, ...], tuple[bool, ...]]:
    """Spans along some dimensions of a torus, cut into parts now and then, in any order."""
    torus = tuple(draw(st.sampled_from([2, 3, 4, 6, 8])) for _ in range(3))
    wraps = tuple(draw(st.booleans()) for _ in range(3))
    spans: list[AxisSpan] = []
    for dimension in draw(st.permutations(range(3))):
        parts: list[AxisSpan] = []
        stride = 1
        while stride < torus[dimension]:
            fitting = [n for n in range(2, 9) if torus[dimension] % (n * stride) == 0]
            extent = draw(st.sampled_from(fitting))
            if draw(st.booleans()):
                parts.insert(0, AxisSpan(dimension=dimension, extent=extent, stride=stride))
            stride *= extent
        spans += parts
    return tuple(spans), torus, wraps


@settings(max_examples=60, deadline=None)
@given(found=spans_of_a_torus())
def test_a_short_ring_loads_links_as_a_long_one_does(
    found: tuple[tuple[AxisSpan, ...], tuple[int, ...], tuple[bool, ...]],
) -> None:
    spans, torus, wraps = found
    small = shrunk(spans, torus, wraps)

    def busiest(spans: tuple[AxisSpan, ...], torus: tuple[int, ...]) -> dict[int, int]:
        loads: dict[int, int] = {}
        for (_, along, _), load in both_ways(ring_along(spans, 3), torus, wraps).items():
            loads[along] = max(loads.get(along, 1), load)
        return loads

    assert busiest(small.spans, small.torus) == busiest(spans, torus)
    assert len(ring_along(small.spans, 3)) <= len(ring_along(spans, 3))
