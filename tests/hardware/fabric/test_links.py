"""Which wires a collective uses: from numbers of devices to links of a torus."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import AutomeshError
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.fabric.links import LinkMap, LinkUse
from automesh.hardware.fabric.placement import Placement
from automesh.hardware.fabric.routes import routes
from automesh.hardware.fabric.torus import way
from automesh.mesh.axes import MeshAxis
from automesh.mesh.layout.devices import create_mesh_for
from automesh.mesh.plan_arrays import Batch
from automesh.program.absent.layout import fake_devices
from tests.support.samples.replay_samples import (
    collective,
    layouts_of,
    mesh,
    node_fabric,
    ring,
    slice_fabric,
)


def links(fabric: Fabric, axes: tuple[MeshAxis, ...]) -> LinkMap:
    layouts = layouts_of(fabric, axes)
    return LinkMap(Placement(axes, fabric, layouts), layouts)


def speed(wires: LinkUse) -> float:
    return float(wires.route.ici_bytes_per_s[0])


@pytest.mark.parametrize(
    "name", ["v5e:4x4", "v5e:2x2", "v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v5p:4x4x8", "7x:2x2x4"]
)
def test_places_are_those_of_real_meshes(name: str) -> None:
    """Device by device, small slices that jax winds up into rings included."""
    fabric = slice_fabric(name)
    kind = fabric.chip.device_kinds[0]
    devices = fake_devices(kind, fabric.torus, fabric.devices_per_chip)
    sizes = [2**power for power in range(8)]
    for shape in itertools.product(sizes, repeat=3):
        if math.prod(shape) != len(devices):
            continue
        axes = mesh(a=shape[0], b=shape[1], c=shape[2])
        made = create_mesh_for(axes, devices=devices).devices
        expected = [(*device.coords, device.core_on_chip) for device in made.flat]
        placement = Placement(axes, fabric, layouts_of(fabric, axes))
        assert [tuple(place) for place in placement.place.tolist()] == expected


def test_an_axis_that_crosses_granules_counts_them_first() -> None:
    axes = mesh(dp=(2, 2), tp=4)
    fabric = slice_fabric("v5e:2x4*2")
    placement = Placement(axes, fabric, layouts_of(fabric, axes))
    assert placement.granule.tolist() == [0] * 8 + [1] * 8
    assert (placement.place[:8] == placement.place[8:]).all()
    assert len(placement) == 16


def test_a_shape_that_nobody_laid_out_is_an_error() -> None:
    with pytest.raises(AutomeshError, match="no layout of the shape 4x4 was asked for"):
        Placement(mesh(a=4, b=4), slice_fabric("v5e:4x4"), Layouts(shapes=(), spans=()))


def test_a_ring_on_a_line_comes_back_over_every_link() -> None:
    # 0 > 1 > 2 > 3 each one link; 3 > 0 back over all three.
    axes = mesh(fsdp=4, tp=4)
    wires = links(slice_fabric("v5e:4x4"), axes).of_pairs(ring(axes, "tp", 1, 0).pairs)
    assert dict(wires.shares) == {"x+": 1.0, "x-": 1.0}
    assert speed(wires) == 1e9
    assert wires.further_hops == 2
    # The same ring the other way takes the same links: both at once have half of each.
    back = links(slice_fabric("v5e:4x4"), axes).of_pairs(ring(axes, "tp", -1, 0).pairs)
    assert dict(back.shares) == {"x+": 1.0, "x-": 1.0}


def test_rings_round_a_closed_dimension_do_not_meet() -> None:
    axes = mesh(fsdp=16, tp=16)
    at = links(slice_fabric("v5e:16x16"), axes)
    assert at.of_pairs(ring(axes, "tp", 1, 0).pairs).shares == (("x+", 1.0),)
    assert at.of_pairs(ring(axes, "tp", -1, 0).pairs).shares == (("x-", 1.0),)
    far = at.of_pairs(ring(axes, "fsdp", 3, 0).pairs)
    # Three links each: three messages over every link.
    assert (far.shares, speed(far), far.further_hops) == ((("y+", 1.0),), 1e9 / 3, 2)


def test_an_axis_over_a_plane_turns_corners() -> None:
    # 16 chips of 4x4 row by row, jax's own ring: 0 1 2 3 7 6 5 9 10 11 15 14 13 12 8 4.
    axes = mesh(fsdp=16)
    fabric = slice_fabric("v5e:4x4")
    wires = links(fabric, axes).of_pairs(ring(axes, "fsdp", 1, 0).pairs)
    # Each step is one link and no link is taken twice.
    assert (speed(wires), wires.further_hops) == (1e9, 0)
    assert {name for name, _ in wires.shares} == {"x+", "x-", "y+", "y-"}
    # Without that order: v5p, z along the last dimension, row after row.
    axes = mesh(fsdp=16, tp=8)
    wires = links(slice_fabric("v5p:4x4x8"), axes).of_pairs(ring(axes, "fsdp", 1, 0).pairs)
    # From the end of a row to the start of the next: one round y, one along x.
    assert wires.further_hops == 1
    assert dict(wires.shares) == {"y+": 1.0, "x+": 1.0}


def test_the_two_ways_round_a_wound_ring_do_not_meet() -> None:
    """Both go along x and y, up and down, but on no link together."""
    axes, fabric = mesh(fsdp=16), slice_fabric("v5e:4x4")
    plan_routes = [ring(axes, "fsdp", step, 0).pairs for step in (1, -1)]
    layouts = layouts_of(fabric, axes)
    at = LinkMap(Placement(axes, fabric, layouts), layouts, plan_routes)
    there, back = (at.of_pairs(pairs) for pairs in plan_routes)
    assert speed(there) == speed(back) == 1e9
    strands = [{name for name, _ in wires.shares} for wires in (there, back)]
    assert not strands[0] & strands[1]
    assert {name[:2] for name in strands[0]} == {"x+", "x-", "y+", "y-"}
    # A gather fills all links, and any other pattern may meet both.
    assert {name for name, _ in at.of_axes(("fsdp",)).shares} == strands[0] | strands[1]
    jumps = at.of_pairs(ring(axes, "fsdp", 5, 0).pairs)
    assert {name for name, _ in jumps.shares} <= strands[0] | strands[1]
    assert len(jumps.shares) % 2 == 0


@pytest.mark.parametrize(
    ("name", "sizes", "axis", "links"),
    [
        ("v5e:4x4", {"fsdp": 16}, "fsdp", 1.0),  # Wound up by jax.
        ("v5e:4x4", {"fsdp": 4, "tp": 4}, "tp", 0.5),  # A line: each way comes back on the other.
        ("v5e:16x16", {"fsdp": 16, "tp": 16}, "tp", 1.0),  # Closed.
        ("v5e:4x4", {"dp": 2, "tp": 8}, "dp", 0.25),  # Two groups on a line share its links.
    ],
)
def test_what_two_messages_of_every_device_have_of_the_links(
    name: str, sizes: dict[str, int], axis: str, links: float
) -> None:
    """To the next and to the last device of the ring, at the same time."""
    axes, fabric = mesh(**sizes), slice_fabric(name)
    batch = Batch(
        names=tuple(one.name for one in axes),
        ici=np.array([[one.ici for one in axes]]),
        dcn=np.ones((1, len(axes)), np.int64),
    )
    route = routes(fabric, layouts_of(fabric, axes), batch, (axis,))
    share = float(route.ici_pair_share[0] * route.ici_bytes_per_s[0])
    assert share == pytest.approx(links * fabric.chip.link_bytes_per_s)


def test_messages_between_neighbours_that_are_apart() -> None:
    # (2, 8) on 4x4: the first axis jumps over two chips of y, on links that others use too.
    axes = mesh(dp=2, tp=8)
    wires = links(slice_fabric("v5e:4x4"), axes).of_pairs(ring(axes, "dp", 1, 0).pairs)
    assert dict(wires.shares) == {"y+": 1.0, "y-": 1.0}
    assert speed(wires) == 1e9 / 2


def test_the_cores_of_a_chip_need_no_link() -> None:
    axes = mesh(dp=4, tp=2)
    fabric = slice_fabric("7x:2x2x1")
    at = links(fabric, axes)
    assert at.of_pairs(ring(axes, "tp", 1, 0).pairs).shares == (("chip", 1.0),)
    along = at.of_pairs(ring(axes, "dp", 1, 0).pairs)
    # Both cores send over the link of their chip, which is twice a device's.
    assert speed(along) == 1e9


def test_messages_to_other_granules_leave_beside_the_others() -> None:
    axes = mesh(dp=(2, 4), tp=4)
    at = links(slice_fabric("v5e:4x4*2"), axes)
    wires = at.of_pairs(ring(axes, "dp", 1, 0).pairs)
    assert wires.apart is not None
    assert float(wires.apart.dcn_bytes_per_s[0]) == 1e8
    assert {name for name, _ in wires.shares} == {"y+"}
    apart = at.of_pairs(ring(axes, "dp", 4, 0).pairs)
    assert (apart.shares, apart.apart, float(apart.route.dcn_size[0])) == ((), None, 2.0)
    assert at.of_pairs(((0, 0),)).shares == ()


def test_nodes_have_a_switch_inside() -> None:
    axes = mesh(dp=(2, 2), tp=4)
    at = links(node_fabric(2, 8), axes)
    assert at.of_pairs(ring(axes, "tp", 1, 0).pairs).shares == (("nvlink", 1.0),)
    assert at.of_axes(("tp",)).shares == (("nvlink", 1.0),)
    both = at.of_axes(("dp",))
    assert (float(both.route.ici_size[0]), float(both.route.dcn_size[0])) == (2.0, 2.0)
    half = at.of_groups(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert (float(half.route.ici_size[0]), speed(half)) == (2.0, 1e9)
    crossing = at.of_groups(((0, 8), (1, 9)))
    assert (crossing.shares, float(crossing.route.dcn_size[0])) == ((), 2.0)


def test_halves_of_an_axis_are_boxes() -> None:
    axes = mesh(fsdp=4, tp=4)
    at = links(slice_fabric("v5e:4x4"), axes)
    pairs = tuple((4 * row + i, 4 * row + i + 1) for row in range(4) for i in (0, 2))
    neighbours = at.of_groups(pairs)
    assert (round(speed(neighbours)), dict(neighbours.shares)) == (1e9, {"x+": 1.0, "x-": 1.0})
    apart = at.of_groups(tuple((4 * row + i, 4 * row + i + 2) for row in range(4) for i in (0, 1)))
    assert round(speed(apart)) == 1e9 / 2  # Two pairs share the links in the middle.


def test_groups_of_no_shape_are_followed_as_rings() -> None:
    axes = mesh(fsdp=4, tp=4)
    # An L of three chips: 0 > 1 > 5 > 0, the last one over two links.
    wires = links(slice_fabric("v5e:4x4"), axes).of_groups(((0, 1, 5),))
    assert float(wires.route.ici_size[0]) == 3.0
    assert wires.route.ici_hops[0] == 2.0
    assert max(share for _, share in wires.shares) == 1.0


@pytest.mark.parametrize("shape", ["2x2", "2x4", "4x4", "4x8"])
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_do_not_share_links(shape: str, slices: int) -> None:
    """Groups inside each of several slices are as fast as the same groups on one slice."""
    one, many = slice_fabric(f"v5e:{shape}"), slice_fabric(f"v5e:{shape}*{slices}")
    for inner in (2, 4):
        rest = one.granule_devices // inner
        alone, axes = mesh(fsdp=inner, tp=rest), mesh(fsdp=(slices, inner), tp=rest)
        here, there = links(one, alone), links(many, axes)
        for name in ("fsdp", "tp"):
            groups = collective("all-gather", alone, name, 0).groups
            everywhere = tuple(
                tuple(number * one.granule_devices + member for member in group)
                for number in range(slices)
                for group in groups
            )
            expected, found = here.of_groups(groups), there.of_groups(everywhere)
            assert speed(found) == pytest.approx(speed(expected))
            assert found.shares == expected.shares


def test_an_all_to_all_loads_the_longer_dimension_more() -> None:
    axes = mesh(ep=8)
    at = links(slice_fabric("v5p:2x2x2"), mesh(ep=8))
    assert at.of_axes(("ep",), spreads=True).shares
    axes = mesh(a=2, b=16, c=4)
    at = links(slice_fabric("v5p:4x4x8"), axes)
    even = dict(at.of_axes(("a", "c")).shares)
    assert set(even.values()) == {1.0}
    shares = dict(links(slice_fabric("v5e:4x8"), mesh(ep=32)).of_axes(("ep",), spreads=True).shares)
    assert shares == {"x+": 0.5, "x-": 0.5, "y+": 1.0, "y-": 1.0}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whole_axes_have_the_routes_of_the_estimate(data: st.DataObject) -> None:
    """Followed by their devices or looked up by their axes: the same links, the same speed."""
    name = data.draw(st.sampled_from(("v5e:4x4", "v5e:8x16", "v5p:4x4x8", "v5e:2x4*2")))
    fabric = slice_fabric(name)
    rest = fabric.granule_devices
    sizes: list[int] = []
    for _ in range(2):
        choices = [2**power for power in range(8) if rest % 2**power == 0]
        sizes.append(data.draw(st.sampled_from(choices)))
        rest //= sizes[-1]
    axes = mesh(a=(fabric.num_granules, sizes[0]), b=sizes[1], c=rest)
    chosen = data.draw(st.sampled_from(("a", "b", "c", "a+b", "b+c", "a+c")))
    at = links(fabric, axes)
    by_axes = at.of_axes(tuple(chosen.split("+")))
    by_groups = at.of_groups(collective("all-gather", axes, chosen, 0).groups)
    assert by_axes.route.ici_size[0] == by_groups.route.ici_size[0]
    assert by_axes.route.dcn_size[0] == by_groups.route.dcn_size[0]
    batch = Batch(
        names=("a", "b", "c"),
        ici=np.array([[axis.ici for axis in axes]]),
        dcn=np.array([[axis.dcn for axis in axes]]),
    )
    direct = routes(fabric, layouts_of(fabric, axes), batch, tuple(chosen.split("+")))
    assert direct.ici_bytes_per_s[0] == by_axes.route.ici_bytes_per_s[0]
    if by_axes.route.ici_size[0] > 1:
        assert max(share for _, share in by_axes.shares) == 1.0
        assert {wire for wire, _ in by_axes.shares} == {wire for wire, _ in by_groups.shares}


@settings(deadline=None)
@given(st.data())
def test_the_most_loaded_link_is_counted(data: st.DataObject) -> None:
    """Any permutation of devices, against a count of our own."""
    fabric = slice_fabric(data.draw(st.sampled_from(("v5e:4x4", "v5e:16x16"))))
    axes = mesh(a=fabric.torus[0], b=fabric.torus[1])
    placement = Placement(axes, fabric, layouts_of(fabric, axes))
    some = data.draw(st.lists(st.integers(0, len(placement) - 1), min_size=2, unique=True))
    pairs = tuple(zip(some, data.draw(st.permutations(some)), strict=True))
    loads: dict[Any, int] = {}
    for source, target in pairs:
        here, there = (tuple(map(int, placement.place[one][:3])) for one in (source, target))
        for link in way(here, there, fabric.torus, fabric.wraps):
            loads[link] = loads.get(link, 0) + 1
    wires = links(fabric, axes).of_pairs(pairs)
    if not loads:
        assert wires.shares == ()
        return
    assert speed(wires) == 1e9 / max(loads.values())
    for dimension, name in enumerate("xy"):
        for direction, sign in ((1, "+"), (-1, "-")):
            most = [n for (_, d, s), n in loads.items() if (d, s) == (dimension, direction)]
            share = dict(wires.shares).get(name + sign, 0.0)
            assert share == max(most, default=0) / max(loads.values())
