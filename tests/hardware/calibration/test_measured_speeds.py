"""Speeds from a profile: sane for every profile, the data sheet's where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.collectives import MEASURED
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.calibration.measured_speeds import Calibrated, find_speeds, speeds_for
from automesh.hardware.calibration.probes import between_seconds, link_seconds
from automesh.hardware.calibration.profile import (
    METHOD,
    SCHEMA,
    CollectiveFit,
    FitError,
    MatmulFit,
    Profile,
    StreamFit,
)
from automesh.hardware.calibration.profile_files import (
    host_of,
    merge_profile,
    profile_folder,
    profile_path,
)
from automesh.hardware.fabric.fabric import Route
from tests.hardware.calibration.test_profile import CPU_8

ERROR = FitError(median=0.1, worst=0.2, points=3)
SHEET = datasheet_speeds(CPU_8.chip, CPU_8, cores=2)
constants = st.floats(0, 1e-3)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    collectives = [
        CollectiveFit(
            collective=kind,
            group_size=size,
            call_s=draw(constants),
            slowness=draw(st.floats(0, 100)),
            error=ERROR,
        )
        for kind in draw(st.lists(st.sampled_from(MEASURED), unique=True))
        for size in draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, unique=True))
    ]
    matmul = [draw(constants) for _ in range(6)]
    names = ("call_s", "batch_s", "left_s", "right_s", "result_s", "flop_s")
    return profile(
        kernel_s=draw(constants),
        matmuls=(MatmulFit(dtype="f32", **dict(zip(names, matmul)), error=ERROR),),
        streams=(StreamFit(form="copy", call_s=0.0, byte_s=draw(constants), error=ERROR),),
        collectives=tuple(collectives),
    )


def profile(**changes: object) -> Profile:
    nothing = Profile(
        schema=SCHEMA,
        platform="cpu",
        device_kind="cpu",
        num_devices=8,
        host=host_of("cpu"),
        made="2026-01-01T00:00:00+00:00",
        versions=(),
        points=(),
        kernel_s=0.0,
        matmuls=(),
        streams=(),
        collectives=(),
        method=METHOD,
    )
    return replace(nothing, **changes)


def route(sizes: list[int], granules: int = 1) -> Route:
    size = np.array(sizes, float)
    return Route(
        ici_size=size,
        dcn_size=np.full(len(sizes), float(granules)),
        ici_bytes_per_s=np.where(size > 1, 5e9, np.inf),
        ici_hops=size - 1,
        dcn_bytes_per_s=np.full(len(sizes), 1e9),
    )


@given(profiles(), st.sampled_from(MEASURED), st.integers(0, 2**32), st.integers(0, 2**32))
def test_collectives_take_longer_with_more_bytes(
    measured: Profile, kind: str, one: int, other: int
) -> None:
    speeds = Calibrated(measured, SHEET)
    sizes = [1, 2, 3, 4, 6, 8, 16, 64]
    few, many = (
        speeds.collective_s(kind, np.full(len(sizes), float(payload)), route(sizes))
        for payload in sorted((one, other))
    )
    for less, more in ((few.latency_s, many.latency_s), (few.ici_s, many.ici_s)):
        assert (less >= 0).all() and (less <= more * (1 + 1e-12)).all()
        assert less[0] == more[0] == 0  # A group of one is free.
    assert (few.dcn_s == 0).all()


@given(profiles(), st.lists(st.integers(1, 10_000), min_size=4, max_size=4), st.integers(0, 3))
def test_multiplications_take_longer_in_every_direction(
    measured: Profile, sizes: list[int], direction: int
) -> None:
    speeds = Calibrated(measured, SHEET)
    larger = [size + (place == direction) for place, size in enumerate(sizes)]
    small, large = (
        float(speeds.matmul_s("f32", *(np.array([float(size)]) for size in one))[0])
        for one in (sizes, larger)
    )
    assert 0 <= small <= large


@given(profiles())
def test_bounds_and_what_was_not_measured_are_the_data_sheets(measured: Profile) -> None:
    speeds = Calibrated(measured, SHEET)
    assert speeds.bound_memory_bytes_per_s == SHEET.bound_memory_bytes_per_s
    assert speeds.bound_flops_per_s("f32") == SHEET.bound_flops_per_s("f32")
    ones = np.array([64.0])
    assert speeds.matmul_s("f64", ones, ones, ones, ones) == SHEET.matmul_s(
        "f64", ones, ones, ones, ones
    )
    known = {fit.collective for fit in measured.collectives}
    for kind in set(MEASURED) - known:
        mine = speeds.collective_s(kind, np.array([1e6]), route([4]))
        sheets = SHEET.collective_s(kind, np.array([1e6]), route([4]))
        assert (mine.latency_s, mine.ici_s) == (sheets.latency_s, sheets.ici_s)
    assert speeds.memory_bytes_per_s > 0
    assert speeds.kernel_overhead_s > 0


def test_groups_that_cross_granules_keep_the_data_sheets_time() -> None:
    fit = CollectiveFit(
        collective="all-reduce", group_size=4, call_s=1.0, slowness=9.0, error=ERROR
    )
    speeds = Calibrated(profile(collectives=(fit,)), SHEET)
    across = route([4], granules=2)
    mine, sheets = (
        one.collective_s("all-reduce", np.array([1e6]), across) for one in (speeds, SHEET)
    )
    assert (mine.latency_s, mine.ici_s, mine.dcn_s) == (
        sheets.latency_s,
        sheets.ici_s,
        sheets.dcn_s,
    )


def test_groups_that_cross_granules_cost_what_was_measured() -> None:
    fits = [
        CollectiveFit(
            collective="all-reduce",
            group_size=size,
            call_s=call_s,
            slowness=slowness,
            error=ERROR,
            granules=granules,
        )
        for granules, size, call_s, slowness in (
            (2, 1, 1e-4, 3.0),
            (2, 4, 3e-4, 5.0),
            (4, 1, 5e-4, 7.0),
            (4, 4, 9e-4, 9.0),
        )
    ]
    speeds = Calibrated(profile(collectives=tuple(fits)), SHEET)

    def found(size: int, granules: int) -> tuple[float, float]:
        """Seconds per call, and slowness."""
        across = route([size], granules=granules)
        one = speeds.collective_s("all-reduce", np.array([1e6]), across)
        links_s = link_seconds("all-reduce", np.array([1e6]), across)
        network_s = between_seconds("all-reduce", np.array([1e6]), across)
        assert network_s[0] == pytest.approx(
            2 * 1e6 / size * (granules - 1) / granules / across.dcn_bytes_per_s[0]
        )
        slowness = one.dcn_s[0] / network_s[0]
        # What the group does inside its granules is slower by the same.
        assert one.ici_s == pytest.approx(slowness * links_s)
        return float(one.latency_s[0]), float(slowness)

    assert found(1, 2) == pytest.approx((1e-4, 3.0))
    assert found(4, 2) == pytest.approx((3e-4, 5.0))
    assert found(2, 2) == pytest.approx((5e-4 / 3, 11 / 3))
    assert found(1, 3) == pytest.approx((3e-4, 5.0))
    assert found(4, 4) == pytest.approx((9e-4, 9.0))
    # Beyond what was measured the waits grow with the granules.
    assert found(4, 8) == pytest.approx((18e-4, 9.0))
    # Groups inside one granule were not measured.
    inside = [
        one.collective_s("all-reduce", np.array([1e6]), route([4])) for one in (speeds, SHEET)
    ]
    assert inside[0] == inside[1]


def test_a_measured_group_costs_what_was_measured() -> None:
    fits = [
        CollectiveFit(
            collective="all-gather", group_size=size, call_s=call_s, slowness=2.0, error=ERROR
        )
        for size, call_s in ((2, 1e-5), (4, 3e-5), (8, 2e-5))
    ]
    speeds = Calibrated(profile(collectives=tuple(fits)), SHEET)
    found = speeds.collective_s("all-gather", np.full(5, 1e6), route([2, 3, 4, 8, 16]))
    # Between sizes a straight line; a dip is noise; beyond the largest the waits of a longer ring.
    assert found.latency_s == pytest.approx([1e-5, 2e-5, 3e-5, 3e-5, 6e-5])
    links_s = link_seconds("all-gather", np.full(5, 1e6), route([2, 3, 4, 8, 16]))
    assert links_s[0] == pytest.approx(0.5e6 / 5e9)
    assert found.ici_s == pytest.approx(2 * links_s)


def test_the_rate_of_memory_is_the_mean_over_forms() -> None:
    forms = (("copy", 1e-9), ("transpose", 3e-9), ("map", 0.0))
    streams = tuple(
        StreamFit(form=form, call_s=1e-6, byte_s=byte_s, error=ERROR) for form, byte_s in forms
    )
    here = profile(streams=streams)
    assert Calibrated(here, SHEET).memory_bytes_per_s == pytest.approx(0.5e9)
    # On accelerators most transposes are free.
    on_gpu = Calibrated(replace(here, platform="gpu"), SHEET)
    assert on_gpu.memory_bytes_per_s == pytest.approx(1e9)


def test_doubling_the_links_never_slows() -> None:
    fit = CollectiveFit(
        collective="all-reduce", group_size=4, call_s=1e-5, slowness=3.0, error=ERROR
    )
    speeds = Calibrated(profile(collectives=(fit,)), SHEET)
    here = route([4])
    wide = replace(here, ici_bytes_per_s=2 * here.ici_bytes_per_s)
    slow, fast = (speeds.collective_s("all-reduce", np.array([1e6]), one) for one in (here, wide))
    assert fast.ici_s == pytest.approx(slow.ici_s / 2)


def test_a_search_picks_up_the_profile_of_its_devices(tmp_path) -> None:
    environ = {"AUTOMESH_PROFILES": str(tmp_path)}
    about = {"platform": "cpu", "device_kind": "cpu"}

    def found() -> str:
        return find_speeds(CPU_8, **about, environ=environ).origin

    assert found() == speeds_for(CPU_8.chip, CPU_8, None).origin
    measured = profile(kernel_s=7e-6)
    path = profile_path(profile_folder(environ), **about, num_devices=8, host=measured.host)
    merge_profile(path, measured)
    assert found() == f"calibration of 8 x cpu on {measured.host}, 2026-01-01"
    path.write_text(path.read_text().replace(f'"method": {METHOD}', '"method": 1'))
    assert found().endswith("2026-01-01, by a former method: calibrate again")
    merge_profile(path, replace(measured, versions=(("jaxlib", "0.0.1"),)))
    assert "with jaxlib 0.0.1, and this is" in found()
    four = replace(CPU_8, granule_devices=4)
    assert find_speeds(four, **about, environ=environ).origin == SHEET.origin
