"""Laws fitted to points: known constants come back, errors are those of points left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.collectives import MEASURED
from automesh.hardware.calibration.points import (
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Point,
    Probe,
    StreamProbe,
)
from automesh.hardware.calibration.probes import Lot, plan_lots, probe_shapes
from automesh.hardware.calibration.profile import (
    METHOD,
    Profile,
    fit_law,
    held_out_error,
    make_profile,
    matmul_row,
    merge,
)
from automesh.hardware.chips import chip_for
from automesh.hardware.fabric.fabric import Fabric, Layouts

CPU_8 = Fabric(kind="shared", chip=chip_for("cpu", "cpu"), num_granules=1, granule_devices=8)
GPU_8 = Fabric(
    kind="switch",
    chip=chip_for("NVIDIA H100 80GB HBM3", "gpu"),
    num_granules=1,
    granule_devices=8,
)
NOWHERE = Layouts(shapes=(), spans=())
LOTS = plan_lots(CPU_8, NOWHERE)
PROBES = tuple(probe for lot in LOTS for probe in lot.probes)
seconds = st.floats(1e-9, 1e-3)


def point(probe: Probe, took_s: float, made: str = "2026-01-01T00:00:00+00:00") -> Point:
    return Point(probe=probe, seconds=took_s, spread=0.01, samples=5, made=made)


def profile_of(points: list[Point], **changes: object) -> Profile:
    about = {
        "platform": "cpu",
        "device_kind": "cpu",
        "num_devices": 8,
        "host": "a host",
        "versions": (("jax", "0.10.2"),),
    }
    return make_profile(points, **{**about, **changes})


@given(st.tuples(seconds, seconds, *[st.floats(1e-13, 1e-8)] * 4))
def test_the_constants_of_multiplications_come_back(constants: tuple[float, ...]) -> None:
    probes = [one for one in PROBES if isinstance(one, MatmulProbe) and one.dtype == "f32"]
    rows = [matmul_row(one.batch, one.m, one.n, one.k) for one in probes]
    took = [float(np.dot(row, constants)) for row in rows]
    (fit,) = profile_of([point(*pair) for pair in zip(probes, took)]).matmuls
    found = (fit.call_s, fit.batch_s, fit.left_s, fit.right_s, fit.result_s, fit.flop_s)
    # What has next to no share in any time cannot be told exactly, and need not be.
    share = np.max(np.array(rows) * constants / np.array(took)[:, None], axis=0)
    assert np.abs(np.array(found) / constants - 1) * share == pytest.approx(0, abs=1e-5)
    assert fit.error.points == len(probes)
    assert fit.error.worst < 1e-3


@given(call_s=seconds, slowness=st.floats(0.1, 100), size=st.sampled_from([2, 4, 8]))
def test_the_constants_of_collectives_come_back(call_s: float, slowness: float, size: int) -> None:
    probes = [
        one
        for one in PROBES
        if isinstance(one, CollectiveProbe)
        and (one.collective, one.group_size) == ("all-gather", size)
    ]
    profile = profile_of([point(one, call_s + slowness * one.link_s) for one in probes])
    (fit,) = profile.collectives
    assert (fit.collective, fit.group_size) == ("all-gather", size)
    assert fit.call_s == pytest.approx(call_s, rel=1e-6)
    assert fit.slowness == pytest.approx(slowness, rel=1e-6)
    assert fit.error.points == len(probes)
    assert fit.error.worst < 1e-6


@given(call_s=seconds, byte_s=st.floats(1e-12, 1e-8))
def test_the_constants_of_streams_come_back(call_s: float, byte_s: float) -> None:
    probes = [one for one in PROBES if isinstance(one, StreamProbe) and one.form == "map"]
    (fit,) = profile_of([point(one, call_s + byte_s * one.bytes) for one in probes]).streams
    assert (fit.call_s, fit.byte_s) == pytest.approx((call_s, byte_s), rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1e6), seconds), min_size=1, max_size=20))
def test_no_constant_is_negative(measured: list[tuple[float, float]]) -> None:
    law = fit_law([(1.0, amount) for amount, _ in measured], [took for _, took in measured])
    assert min(law) >= 0


def test_the_error_is_that_of_points_left_out() -> None:
    rows = [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    took = [1.0, 2.0, 3.0, 40.0]
    error = held_out_error(rows, took, range(4))
    # The law through the first three says 4 for the last: 90 % off.
    assert error.worst >= 0.9
    assert error.points == 4
    together = held_out_error(rows, took, [0, 0, 1, 1])
    assert together.points == 0  # Either half alone has one size only.


def test_too_few_points_make_no_law() -> None:
    one = CollectiveProbe(
        collective="all-reduce", group_size=2, stride=1, payload_bytes=4096, link_s=1e-6
    )
    assert profile_of([point(one, 1e-4)]).collectives == ()
    assert profile_of([point(one, 0.0), point(replace(one, payload_bytes=8192), 1e-4)]) is not None
    assert profile_of([]).kernel_s == 0.0


def test_merging_lets_newer_points_win_and_fits_again() -> None:
    sizes = (1000, 2000, 3000)
    probes = [StreamProbe(form="copy", bytes=size) for size in sizes]
    older = profile_of([point(one, one.bytes * 1e-9) for one in probes])
    later = "2026-02-01T00:00:00+00:00"
    again = [point(one, one.bytes * 2e-9, later) for one in probes[:2]]
    newer = profile_of([*again, point(KernelProbe(), 1e-6, later)], versions=(("jax", "0.11"),))
    both = merge(older, newer)
    assert {one.probe: one.seconds for one in both.points} == pytest.approx(
        {probes[0]: 2e-6, probes[1]: 4e-6, probes[2]: 3e-6, KernelProbe(): 1e-6}
    )
    assert (both.made, both.versions, both.kernel_s) == (later, newer.versions, 1e-6)
    assert both.streams == profile_of(list(both.points)).streams != older.streams
    # The other way round the newer points win too.
    assert merge(newer, older).points == both.points
    assert merge(both, both) == both


def test_what_a_cache_holds_says_nothing_of_the_speed_of_memory() -> None:
    """As on an H100: 16 MiB stay in its cache, and gave memory a speed beyond its data sheet."""
    mib = 2**20
    measured = {mib: 5.2e-6, 16 * mib: 5.5e-6, 512 * mib: 187e-6, 1024 * mib: 370e-6}
    points = [point(StreamProbe(form="copy", bytes=size), s) for size, s in measured.items()]
    (far,) = profile_of(points, platform="gpu").streams
    assert 1 / far.byte_s == pytest.approx(2.92e12, rel=0.01)
    assert far.call_s == pytest.approx(4.8e-6, rel=0.02)
    assert far.error.points == 0  # Of two sizes neither can be left out.
    points.append(point(StreamProbe(form="copy", bytes=2048 * mib), 760e-6))
    (far,) = profile_of(points, platform="gpu").streams
    # The error is that of the law that is told: of each size by the two others.
    assert far.error.points == 3 and 0.005 < far.error.worst < 0.05
    # A host's memory is also what its caches hold: there models are as small.
    (near,) = profile_of(points, platform="cpu").streams
    assert 1 / near.byte_s > 3.3e12


def test_points_of_a_former_method_are_left_out() -> None:
    probes = [StreamProbe(form="copy", bytes=size) for size in (1000, 2000)]
    older = replace(profile_of([point(one, 20e-6) for one in probes]), method=1)
    newer = profile_of([point(probes[0], 1e-6)])
    assert newer.method == METHOD
    both = merge(older, newer)
    assert {one.probe: one.seconds for one in both.points} == {probes[0]: 1e-6}
    assert both.method == METHOD
    assert merge(older, older).method == 1


def test_only_profiles_of_the_same_devices_merge() -> None:
    here = profile_of([])
    for change in ({"num_devices": 4}, {"host": "another"}, {"device_kind": "arm"}):
        with pytest.raises(ValueError, match="do not merge"):
            merge(here, profile_of([], **change))
    with pytest.raises(ValueError, match="do not merge"):
        merge(here, profile_of([], num_granules=2))
    tpu = {"platform": "tpu", "device_kind": "TPU v4", "host": ""}
    few, many = (profile_of([], **tpu, num_devices=number) for number in (4, 8))
    assert merge(few, many).num_devices == 8


def test_every_size_of_axis_is_measured_at_both_ends() -> None:
    assert probe_shapes(CPU_8) == ((4, 2, 1), (2, 4, 1), (1, 8, 1))
    assert probe_shapes(GPU_8) == ((4, 2, 1), (1, 2, 4), (2, 4, 1), (1, 4, 2), (1, 8, 1))
    probes = [probe for lot in plan_lots(GPU_8, NOWHERE) for probe in lot.probes]
    collectives = [one for one in probes if isinstance(one, CollectiveProbe)]
    assert {one.collective for one in collectives} == set(MEASURED)
    for kind in MEASURED:
        where = {(c.group_size, c.stride) for c in collectives if c.collective == kind}
        assert where == {(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)}
    assert len(set(probes)) == len(probes)
    assert len(set(PROBES)) == len(PROBES) < len(probes)
    assert all(one.link_s > 0 for one in collectives)


def test_groups_over_granules_are_measured_for_every_size_in_each() -> None:
    four_of_two = replace(GPU_8, num_granules=4, granule_devices=2)
    probes = [probe for lot in plan_lots(four_of_two, NOWHERE) for probe in lot.probes]
    assert len(set(probes)) == len(probes)
    collectives = [one for one in probes if isinstance(one, CollectiveProbe)]
    for kind in MEASURED:
        where = [(c.granules, c.group_size) for c in collectives if c.collective == kind]
        # All granules first: that is what a budget should not leave out.
        assert list(dict.fromkeys(where)) == [(1, 2), (4, 1), (4, 2), (2, 1), (2, 2)]
    between = [one for one in collectives if one.granules > 1]
    assert all(one.link_s > 0 for one in between)
    assert {str(one).split(" over ")[1] for one in between if one.payload_bytes == 2**20} == {
        f"{group} {2**20} B"
        for group in (
            "4 granules",
            "2 in each of 4 granules",
            "2 granules",
            "2 in each of 2 granules",
        )
    }


def test_one_lot_holds_all_sizes_of_a_law() -> None:
    laws: dict[tuple[str, int], set[str]] = {}
    for lot in LOTS:
        for one in lot.probes:
            if isinstance(one, CollectiveProbe):
                laws.setdefault((one.collective, one.group_size), set()).add(lot.name)
    assert all(len(lots) == 1 for lots in laws.values())


def test_a_single_device_has_no_collectives() -> None:
    alone = replace(CPU_8, granule_devices=1)
    kinds = {type(one) for lot in plan_lots(alone, NOWHERE) for one in lot.probes}
    assert kinds == {KernelProbe, StreamProbe, MatmulProbe}


def test_shapes_that_jax_refuses_are_left_out() -> None:
    refusing = Layouts(shapes=(), spans=(), refused=(((1, 2, 4), "no"),))
    lots: tuple[Lot, ...] = plan_lots(GPU_8, refusing)
    strides = {
        (one.group_size, one.stride)
        for lot in lots
        for one in lot.probes
        if isinstance(one, CollectiveProbe)
    }
    assert strides == {(2, 1), (4, 1), (4, 2), (8, 1)}
