"""Speeds from data sheets, against hand-computed formulas and published measurements.

The shares in `data/achieved.json` come from some of these measurements (the largest messages and
groups): for those a test says that the formula around them is right, for the others that it carries
over to small messages, small groups and several nodes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.chips import chip_for
from automesh.hardware.fabric.fabric import Fabric, Layouts, Route
from automesh.hardware.fabric.routes import routes
from automesh.mesh.plan_arrays import Batch
from automesh.program.absent.layout import lay_out
from automesh.worker.messages import LayoutJob

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
NOWHERE = Layouts(shapes=(), spans=())
CPU = Fabric(
    kind="shared", chip=chip_for("cpu", "cpu"), num_granules=1, granule_devices=8
)  # fmt: skip


def wired(name, ici, dcn=None, axes="a"):
    """Speeds, and the route along `axes` of one mesh with axes a, b, c ..."""
    absent = parse_target(name, {}).absent
    fabric, layouts = absent.fabric, NOWHERE
    if fabric.torus:
        layouts = lay_out(
            LayoutJob(
                platform="tpu",
                device_kind=absent.device_kind,
                torus=fabric.torus,
                devices_per_chip=fabric.devices_per_chip,
                shapes=(ici,),
            )
        )
    batch = Batch(
        names=tuple("abcde"[: len(ici)]),
        ici=np.array([ici]),
        dcn=np.array([dcn or (1,) * len(ici)]),
    )
    return datasheet_speeds(fabric.chip, fabric), routes(fabric, layouts, batch, tuple(axes))


def parts(speeds, route, kind, payload):
    times = speeds.collective_s(kind, np.array([float(payload)]), route)
    return float(times.latency_s[0]), float(times.ici_s[0]), float(times.dcn_s[0])


def seconds(name, ici, kind, payload, dcn=None, axes="a"):
    return sum(parts(*wired(name, ici, dcn, axes), kind, payload))


def cube_s(speeds, side, dtype="bf16"):
    one, n = np.ones(1), np.array([float(side)])
    return float(speeds.matmul_s(dtype, one, n, n, n)[0])


def sheet(name):
    fabric = parse_target(name, {}).absent.fabric
    return datasheet_speeds(fabric.chip, fabric)


# AI-Hypercomputer/tpu-recipes @c8cfe2f6, training/ironwood: bf16 TFLOP/s of one device.
@pytest.mark.parametrize(
    ("side", "published", "within"),
    [
        (128, 2.6, 1.3),
        (256, 18.3, 1.25),
        (512, 105.1, 1.1),
        (1024, 349.7, 1.1),
        (2048, 679.3, 1.1),
        (4096, 892.9, 1.05),
        (16384, 950.1, 1.05),
        (32768, 956.4, 1.05),
    ],
)
def test_matmuls_follow_the_ironwood_curve(side, published, within):
    achieved = 2 * side**3 / cube_s(sheet("7x-8"), side) / 1e12
    assert published / within < achieved < published * within


def test_a_large_matmul_on_trillium():
    # tpu-recipes, microbenchmarks/trillium: 827 TFLOP/s at 8192 cubed.
    assert 2 * 8192**3 / cube_s(sheet("v6e-8"), 8192) / 827e12 == pytest.approx(1, rel=0.03)


def test_small_shards_are_slow_and_odd_sizes_are_padded():
    speeds, one = sheet("v5p-8"), np.ones(1)

    def rate(m, n, k):
        sizes = (np.array([float(size)]) for size in (m, n, k))
        return 2 * m * n * k / float(speeds.matmul_s("bf16", one, *sizes)[0])

    assert rate(8192, 8192, 128) > 1.9 * rate(8192, 8192, 65)
    assert rate(8192, 8192, 8192) > 1.5 * rate(512, 512, 512)
    # Either operand can be the short one.
    assert rate(16, 8192, 8192) == pytest.approx(rate(8192, 16, 8192))
    assert rate(8192, 8192, 8192) < speeds.bound_flops_per_s("bf16")


# Payload, seconds. v6e and DCN: tpu-recipes, psum of a bf16 17408 x 17408 array, over 16x16, and of
# half of it per device over two slices. Ironwood: one all-reduce of the f32 gradient of qwen3-0.6b
# (MaxText perf_parity).
@pytest.mark.parametrize(
    ("name", "ici", "dcn", "payload", "published"),
    [
        ("v6e-256", (256,), None, 17408**2 * 2, 5.12e-3),
        ("v6e-256-2", (1, 256), (2, 1), 17408**2, 73.7e-3),
        ("7x:2x2x1", (8,), None, 2.38e9, 20.1e-3),
    ],
)
def test_all_reduces_on_tpu_slices(name, ici, dcn, payload, published):
    found = seconds(name, ici, "all-reduce", payload, dcn)
    assert found == pytest.approx(published, rel=0.05)


# tpu-recipes, all-gather on 2x2x1: MB that cross the links of a chip (3/4 of the array), GB/s.
@pytest.mark.parametrize(
    ("crossing", "speed"),
    [(1.57, 71.8), (6.29, 129.2), (25.2, 161.9), (100.7, 174.8), (402.7, 178.8)],
)
def test_all_gathers_on_ironwood(crossing, speed):
    found = seconds("7x:2x2x1", (8,), "all-gather", crossing * 1e6 / 0.75)
    assert found == pytest.approx(crossing * 1e-3 / speed, rel=0.12)


def test_an_all_gather_over_four_chips_in_a_line():
    # scaling-book: 680 us where the formula has 560, 8 us for a tiny array.
    array = 560e-6 * 45e9 * 4 / 3
    assert seconds("v5e:4x4", (4, 4), "all-gather", array) == pytest.approx(680e-6, rel=0.05)
    assert seconds("v5e:4x4", (4, 4), "all-gather", 64) == pytest.approx(8e-6, rel=0.05)


# ai-dynamo/aiconfigurator @095f58a5, nccl_perf: microseconds by bytes; of an all-to-all the bytes
# that one GPU sends.
@pytest.mark.parametrize(
    ("chip", "gpus", "kind", "published_us"),
    [
        ("h100", 8, "all-reduce", (16.0, 38.2, 199.8, 2111.1)),
        ("h100", 8, "all-gather", (10.6, 22.2, 125.5, 1401.5)),
        ("h100", 2, "all-gather", (5.8, 16.6, 92.9, 1038.6)),
        ("h100", 8, "all-to-all", (7.5, 18.6, 124.9, 1490.4)),
        ("a100-80gb", 8, "all-reduce", (21.3, 53.7, 367.0, 4225.9)),
        ("a100-80gb", 2, "all-reduce", (11.0, 47.6, 224.2, 2781.1)),
        ("b200", 8, "reduce-scatter", (16.8, 21.0, 107.1, 766.5)),
    ],
)
def test_one_node_of_gpus(chip, gpus, kind, published_us):
    for size, microseconds in zip((8192, 2097152, 33554432, 536870912), published_us, strict=True):
        payload = size * gpus if kind == "all-to-all" else size
        found_us = 1e6 * seconds(f"gpu-{chip}-{gpus}", (gpus,), kind, payload)
        assert microseconds / 1.45 < found_us < microseconds * 1.45


# crazyguitar/aws-gpu-communication-benchmark @fd167f97, data: bus GB/s on p5.48xlarge of nccl-tests
# with 32, 256, 2048 (and 8192) MiB. Of these the gathers of 32 MiB gave the time of a step between
# nodes, the largest the share of the network, reductions of 256 MiB over 16 and 32 nodes that of a
# tree; all else follows from NCCL's rings and trees.
EFA = {
    ("all-reduce", 2): (147.3, 364.5, 445.1, 477.7),
    ("all-reduce", 4): (95.4, 273.3, 347.6, 357.0),
    ("all-reduce", 8): (86.7, 232.1, 278.2, 355.4),
    ("all-reduce", 16): (74.9, 148.1, 270.9, 356.3),
    ("all-reduce", 32): (66.3, 138.0, 269.5, 321.1),
    ("all-gather", 2): (131.3, 215.6, 328.6),
    ("all-gather", 4): (83.6, 253.4, 330.9),
    ("all-gather", 8): (46.3, 215.4, 293.7),
    ("all-gather", 16): (24.9, 144.1, 265.2),
    ("all-gather", 32): (12.4, 86.3, 262.8),
}


def bus_seconds(kind, nodes, payload, bus):
    passes, gpus = 1 + (kind == "all-reduce"), 8 * nodes
    return passes * (gpus - 1) / gpus * payload / (bus * 1e9)


@pytest.mark.parametrize(("kind", "nodes"), EFA)
def test_collectives_over_nodes_of_gpus(kind, nodes):
    for mebibytes, bus in zip((32, 256, 2048, 8192), EFA[kind, nodes]):
        payload = mebibytes * 2**20
        published = bus_seconds(kind, nodes, payload, bus)
        found = seconds(f"gpu-p5.48xlarge-{8 * nodes}", (8,), kind, payload, (nodes,))
        assert published / 1.45 < found < published * 1.25


# vinjn/nanotron-ultrascale-playbook @924e4d0b: bus GB/s of 256 MB on H100 nodes with EFA that
# others used, too: the middle of many runs, and those that 5 and 95 % of them stay below.
@pytest.mark.parametrize(
    ("kind", "nodes", "middle", "within"),
    [
        ("all-reduce", 2, 362, (302, 436)),
        ("all-reduce", 16, 84.7, (31, 188)),
        ("all-reduce", 64, 32.9, (12, 177)),
        ("all-gather", 8, 69.0, (47, 178)),
        ("all-gather", 16, 55.0, (24, 127)),
        ("all-gather", 32, 28.0, (12, 77)),
        ("all-gather", 64, 11.0, (6, 44)),
    ],
)
def test_a_network_that_others_use_is_slower(kind, nodes, middle, within):
    found = seconds(f"gpu-p5.48xlarge-{8 * nodes}", (8,), kind, 256e6, (nodes,))
    slowest, fastest = (bus_seconds(kind, nodes, 256e6, bus) for bus in within)
    assert 0.85 * fastest < found < slowest
    if nodes > 2:
        assert found < bus_seconds(kind, nodes, 256e6, middle)


def test_one_ring_goes_through_all_devices_of_a_group():
    # NCCL's tuning.cc: n - 1 steps, one of them between nodes for each node but one; the other way
    # of an all-reduce is a tree of nodes, at 0.45 of the ring's speed here.
    hop, step, start = 3.4e-6, 59e-6, 8.4e-6
    ring = start + 8 * 7 * hop + 7 * step
    latency, _, dcn = parts(*wired("gpu-h100-64", (8,), (8,)), "all-gather", 1e9)
    assert latency == pytest.approx(ring)
    assert dcn == pytest.approx(7 / 8 * 1e9 / (400e9 * 0.85))
    # Little is a tree, much is a ring, and what a group sends in short messages is bounded.
    latency, _, dcn = parts(*wired("gpu-h100-64", (8,), (8,)), "all-reduce", 32e6)
    assert latency == pytest.approx(start + 2 * 7 * hop + 2 * 3 * step)
    assert dcn == pytest.approx(2 * 7 / 8 * 32e6 / (400e9 * 0.85 * 0.45))
    latency, _, dcn = parts(*wired("gpu-h100-64", (8,), (8,)), "all-reduce", 8e9)
    assert latency == pytest.approx(start + 2 * (8 * 7 * hop + 7 * step))
    assert dcn == pytest.approx(2 * 7 / 8 * 8e9 / (400e9 * 0.85))
    latency, _, dcn = parts(*wired("gpu-h100-64", (8,), (8,)), "all-gather", 1e5)
    assert latency == pytest.approx(6.6e-6 + 8 * 7 * 6e-7 + 7 * 50e-6)
    assert dcn == pytest.approx(7 / 8 * 1e5 / 2e10)


def test_slices_are_a_hierarchy():
    # Reduce-scatter over 16 chips of two lines each, all-reduce of a sixteenth between two slices
    # over each chip's share of the network, all-gather: 45 GB/s links, 3.125 GB/s of network.
    speeds, route = wired("v5e:4x4*2", (1, 16), (2, 1), "ab")
    latency, ici, dcn = parts(speeds, route, "all-reduce", 16e9)
    assert ici == pytest.approx(2 * 15 / 16 * 16e9 / (2 * 45e9 * 0.82))
    assert dcn == pytest.approx(2 * 1 / 2 * 1e9 / (3.125e9 * 0.33))
    assert latency == pytest.approx(5e-6 + 2 * 6 * 1e-6 + 1e-4)
    # Only across: all of the array goes through one device's share.
    _, ici, dcn = parts(*wired("v5e:4x4*2", (1, 16), (2, 1), "a"), "all-reduce", 16e9)
    assert (ici, dcn) == (0.0, pytest.approx(16e9 / (3.125e9 * 0.33)))


def test_an_all_to_all_over_nodes():
    # scaling-book, GPUs: V (M - 1) / (M^2 W), W the 400 GB/s of a node.
    _, _, dcn = parts(*wired("gpu-h100-16", (8,), (2,)), "all-to-all", 1e9)
    assert dcn == pytest.approx(1e9 * 1 / (4 * 400e9) / 0.85)


def test_a_permute_uses_one_link():
    # A quarter of what an all-gather has on a whole torus, all of it on a line.
    for name, ici in [("v5e:16x16", (256,)), ("v5e:4x4", (4, 4))]:
        _, ici_s, _ = parts(*wired(name, ici), "collective-permute", 1e9)
        assert ici_s == pytest.approx(1e9 / (45e9 * 0.82))


def test_few_instincts_use_few_links():
    pair, all_of_them = (
        parts(*wired("mi300x-8", ici), "all-gather", 1e9)[1] for ici in [(2, 4), (8,)]
    )
    assert pair / all_of_them == pytest.approx(7 * (1 / 2) / (7 / 8))


def many(draw_sizes, fabric):
    sizes = np.array(draw_sizes, np.int64)
    batch = Batch(names=("a",), ici=sizes[:, :1], dcn=sizes[:, 1:])
    return routes(fabric, NOWHERE, batch, ("a",))


FABRICS = {
    "cpu": CPU,
    "h100": parse_target("gpu-h100-64", {}).absent.fabric,
    "mi300x": parse_target("gpu-mi300x-64", {}).absent.fabric,
    # Of a torus only the routes are given here: any that its links allow.
    "v5p": replace(parse_target("v5p-128-8", {}).absent.fabric, kind="switch"),
}
amounts = st.floats(0, 1e12)


@given(
    st.sampled_from(sorted(FABRICS)),
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), amounts), min_size=1, max_size=6),
)
def test_doubling_every_bandwidth_slows_no_collective(name, kind, groups):
    fabric = FABRICS[name]
    chip = fabric.chip
    fast = replace(
        chip,
        link_bytes_per_s=2 * chip.link_bytes_per_s,
        dcn_bytes_per_s=2 * chip.dcn_bytes_per_s,
    )
    payload = np.array([amount for *_, amount in groups])
    totals = []
    for one in (chip, fast):
        speeds = datasheet_speeds(one, replace(fabric, chip=one), cores=4)
        route = many([group[:2] for group in groups], replace(fabric, chip=one))
        times = speeds.collective_s(kind, payload, route)
        for seconds_of in (times.latency_s, times.ici_s, times.dcn_s):
            assert seconds_of.shape == payload.shape
            assert np.all(seconds_of >= 0)
            assert not seconds_of[route.ici_size * route.dcn_size == 1].any()
        totals.append(times.latency_s + times.ici_s + times.dcn_s)
        more = speeds.collective_s(kind, payload * 1.5, route)
        assert np.all(more.latency_s + more.ici_s + more.dcn_s >= totals[-1] * (1 - 1e-12))
        if not speeds.achieved.overlaps:
            inside = times.latency_s[route.ici_size * route.dcn_size > 1]
            assert np.all(inside > 0)
    assert np.all(totals[1] <= totals[0])


@given(
    st.sampled_from(sorted(FABRICS)),
    st.sampled_from(["bf16", "f32", "f8E4M3FN", "i8", "f64"]),
    st.tuples(*[st.floats(0.5, 20000)] * 4),
    st.integers(0, 3),
)
def test_matmuls_are_sound(name, dtype, sizes, grown):
    fabric = FABRICS[name]
    fast = replace(
        fabric.chip,
        peak_flops_per_s=tuple((kind, 2 * peak) for kind, peak in fabric.chip.peak_flops_per_s),
    )
    columns = [np.array([size]) for size in sizes]
    slow_s = datasheet_speeds(fabric.chip, fabric, cores=4).matmul_s(dtype, *columns)
    assert datasheet_speeds(fast, fabric, cores=4).matmul_s(dtype, *columns) <= slow_s
    columns[grown] = columns[grown] * 1.3
    assert datasheet_speeds(fabric.chip, fabric, cores=4).matmul_s(dtype, *columns) >= slow_s
    bound = datasheet_speeds(fabric.chip, fabric).bound_flops_per_s(dtype)
    assert fabric.chip.rough == (bound == 0)
    if bound:
        assert 2 * np.prod(sizes) / slow_s[0] <= bound


def test_bounds_are_the_nominal_peaks_and_only_of_known_chips():
    h100 = sheet("gpu-h100-8")
    assert h100.bound_flops_per_s("bf16") == h100.bound_flops_per_s("f32") == 989e12
    assert h100.bound_flops_per_s("f8E5M2") == 1979e12
    assert h100.bound_memory_bytes_per_s == 3352e9
    assert h100.memory_bytes_per_s == pytest.approx(0.8 * 3352e9)
    # No figure for four bits, so no bound.
    assert h100.bound_flops_per_s("i4") == 0
    # A v5e has no fp8 figure: nothing of eight bits is faster than its int8.
    assert sheet("v5e-8").bound_flops_per_s("f8E4M3FN") == 394e12
    for device, platform in [("cpu", "cpu"), ("NVIDIA GeForce RTX 4090", "gpu")]:
        chip = chip_for(device, platform)
        speeds = datasheet_speeds(chip, replace(CPU, chip=chip))
        assert speeds.bound_flops_per_s("bf16") == speeds.bound_memory_bytes_per_s == 0
        assert speeds.origin.startswith("rough figures")
    assert h100.origin == "data sheet of H100-SXM5-80GB"


def test_virtual_devices_share_the_cores_of_their_host():
    def host(devices, cores=4):
        return datasheet_speeds(CPU.chip, replace(CPU, granule_devices=devices), cores=cores)

    # Eight devices on four cores have half a core each, four on eight have two.
    assert cube_s(host(8), 2048, "f32") == pytest.approx(2 * cube_s(host(4), 2048, "f32"), rel=0.01)
    assert host(8).memory_bytes_per_s == host(4).memory_bytes_per_s / 2
    assert cube_s(host(4, 8), 2048) < cube_s(host(4), 2048)
    assert host(8).kernel_overhead_s > host(4).kernel_overhead_s
    # They meet, which takes longer than their small messages do, and copy.
    route = many([(8, 1)], CPU)
    latency, copies, _ = parts(host(8), route, "all-reduce", 1e3)
    assert 5e-5 < latency < 2e-4
    assert copies < latency
    assert parts(host(8), route, "all-reduce", 1e9)[1] > 0.1


def test_an_unknown_kind_of_collective_has_no_price():
    speeds, route = wired("gpu-h100-8", (8,))
    with pytest.raises(ValueError, match="no formula for a collective of kind gossip"):
        speeds.collective_s("gossip", np.ones(1), route)


def test_routes_can_be_picked():
    route = many([(2, 1), (4, 2), (8, 8)], FABRICS["h100"])
    picked = route.rows(np.array([2, 0]))
    assert isinstance(picked, Route)
    assert picked.ici_size.tolist() == [8, 2]
    assert picked.ici_transit.tolist() == [1, 1]
