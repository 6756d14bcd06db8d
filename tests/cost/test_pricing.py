"""Pricing of many plans: against plain Python, and the properties that any price must have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from automesh.cost.pricing import PlanPrices, price, price_on
from automesh.cost.terms import (
    CollectiveTerm,
    DivisibilityGuard,
    HostTransfer,
    Kernel,
    LivenessPoint,
    Matmul,
    Monomial,
    Near,
    Region,
    Sum,
    Terms,
    Uncounted,
    Windowed,
)
from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.fabric.fabric import Layouts
from automesh.hardware.model import HardwareModel
from automesh.mesh.plan_arrays import Batch
from tests.support.samples.cost_reference import reference
from tests.support.samples.cost_samples import (
    PlainSpeeds,
    dense_terms,
    mono,
    powers_of_two,
    simple_routes,
    times,
)

AXES = ("a", "b", "c")
SETS = [tuple(itertools.compress(AXES, kept)) for kept in itertools.product((0, 1), repeat=3)]
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
CHIPS = (
    PlainSpeeds(),
    PlainSpeeds(near_bytes=1e7, epilogue_bytes_per_s=3e11, window_flops_per_byte=8e3),
    PlainSpeeds(near_bytes=5e8),
)
few = settings(max_examples=25, deadline=None)


def monomials(largest: float) -> st.SearchStrategy[Monomial]:
    powers = st.dictionaries(st.sampled_from(AXES), st.sampled_from([-2, -1, 1]), max_size=3)
    return st.builds(
        lambda digits, power: mono(float(digits) * largest / 64, **power),
        st.integers(1, 64),
        powers,
    )


def sums(largest: float, most: int = 3) -> st.SearchStrategy[Sum]:
    return st.lists(monomials(largest), min_size=1, max_size=most).map(tuple)


matmuls = st.builds(
    Matmul,
    batch=st.just(mono(1)),
    m=monomials(8192),
    n=monomials(8192),
    k=monomials(4096),
    dtype=st.sampled_from(["bf16", "f32", "s8"]),
)
axis_sets = st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True).map(
    lambda axes: tuple(sorted(axes))
)
kernels = st.builds(
    Kernel,
    region=st.integers(0, 2),
    count=sums(64, 1),
    bytes=sums(1e9),
    matmuls=st.lists(matmuls, max_size=2).map(tuple),
    windowed=st.lists(
        st.builds(
            Windowed,
            axes=axis_sets,
            bytes=sums(1e8),
            whole_bytes=sums(1e9),
            intensity=sums(1e4),
            adds=st.booleans(),
            buffer_bytes=st.one_of(st.just(()), sums(1e8)),
        ),
        max_size=2,
    ).map(tuple),
)


@st.composite
def kernels_on_the_chip(draw: st.DrawFn) -> Kernel:
    """Kernels some of whose bytes may stay on the chip."""
    kernel = draw(kernels)
    near = draw(st.lists(st.builds(Near, buffer_bytes=monomials(1e9), bytes=sums(1e8)), max_size=2))
    more = [one for each in near for one in each.bytes]
    epilogue = draw(sums(1e8)) if kernel.matmuls else ()
    return replace(
        kernel, bytes=(*kernel.bytes, *more, *epilogue), near=tuple(near), epilogue=epilogue
    )


collectives = st.builds(
    CollectiveTerm,
    region=st.integers(0, 2),
    count=sums(64, 1),
    kind=st.sampled_from(KINDS),
    axes=axis_sets,
    payload_bytes=sums(1e9, 2),
    hides=st.booleans(),
    windowed=st.booleans(),
    whole_bytes=sums(1e9),
    intensity=sums(1e4),
    ring_region=st.one_of(st.none(), st.integers(0, 2)),
)
copies = st.builds(
    HostTransfer,
    regions=st.sampled_from([(0,), (1, 2)]),  # A block's regions are its own.
    count=sums(64, 1),
    bytes=sums(1e9, 2),
    is_to_host=st.booleans(),
)
steps = st.builds(
    Terms,
    active=st.just(AXES),
    sampled=st.just(()),
    platform=st.sampled_from(["tpu", "gpu"]),
    regions=st.tuples(*[st.builds(Region, name=st.just("step"), trips=sums(32, 1))] * 3),
    kernels=st.lists(kernels_on_the_chip(), max_size=5).map(tuple),
    collectives=st.lists(collectives, max_size=6).map(tuple),
    host_transfers=st.lists(copies, max_size=3).map(tuple),
    points=st.lists(st.builds(LivenessPoint, bytes=sums(1e9)), max_size=5).map(tuple),
    argument_bytes=sums(1e9),
    output_bytes=sums(1e9, 1),
    alias_bytes=sums(1e7, 1),
    window_threshold_bytes=st.sampled_from([0.0, 0.0, 1e8, 5e8, 1e12]),
)


def parts(least: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    size = st.sampled_from([1, 1, 2, 3, 4])
    return st.lists(st.tuples(size, size, size), min_size=least, max_size=8)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    ici = draw(parts(1))
    dcn = draw(st.lists(st.sampled_from(draw(parts(1))), min_size=len(ici), max_size=len(ici)))
    return Batch(names=AXES, ici=np.array(ici, np.int64), dcn=np.array(dcn, np.int64))


def priced(step: Terms, batch: Batch, speeds: PlainSpeeds | None = None) -> PlanPrices:
    by_set = {active: replace(step, active=active) for active in SETS}
    return price_on(by_set, batch, routes_of=simple_routes, speeds=speeds or PlainSpeeds())


def some(batch: Batch, rows: np.ndarray) -> Batch:
    return Batch(names=batch.names, ici=batch.ici[rows], dcn=batch.dcn[rows])


@few
@given(step=steps, batch=batches(), chip=st.sampled_from(CHIPS))
def test_arrays_agree_with_plain_python(step: Terms, batch: Batch, chip: PlainSpeeds) -> None:
    prices = priced(step, batch, chip)
    for row in range(len(batch)):
        expected = reference(step, batch, row, chip)
        estimate = prices.estimated(row)
        assert estimate.step_s == pytest.approx(expected.step_s, rel=1e-9, abs=1e-15)
        assert estimate.bracket_s == pytest.approx(
            (expected.lower_s, expected.upper_s), rel=1e-9, abs=1e-15
        )
        assert estimate.bound_s == pytest.approx(expected.bound_s, rel=1e-9, abs=2e-12)
        assert abs(estimate.memory_bytes - expected.memory_bytes) <= 1  # halves round either way
        assert prices.collectives[row] == pytest.approx(expected.collectives)
        # What is left of a difference of equal seconds may be zero on one side alone.
        estimated = dict.fromkeys(expected.causes, 0.0) | dict(estimate.causes)
        causes = dict.fromkeys(estimated, 0.0) | dict(expected.causes)
        # What is left of two times that are nearly equal is as exact as these are.
        rounding_s = max(1e-15, 1e-12 * expected.upper_s)
        assert estimated == pytest.approx(causes, rel=1e-6, abs=rounding_s)


@few
@given(step=steps, batch=batches())
def test_bound_lower_central_upper(step: Terms, batch: Batch) -> None:
    prices = priced(step, batch)
    assert (prices.bound_s <= prices.lower_s * (1 + 1e-12)).all()
    assert (prices.lower_s <= prices.step_s).all()
    assert (prices.step_s <= prices.upper_s).all()


@few
@given(step=steps, batch=batches())
def test_the_interval_of_memory_holds_the_estimate_and_all_that_lasts(
    step: Terms, batch: Batch
) -> None:
    prices = priced(replace(step, memory_spread=(0.5, 2.0)), batch)
    # Aliases are parts of arguments, which formulas drawn at random do not know.
    assume(bool((prices.lasting_bytes >= 0).all()))
    for row in np.flatnonzero(~prices.needs_own).tolist():
        found = prices.estimated(row)
        least, most = found.memory_interval
        assert prices.lasting_bytes[row] <= least <= found.memory_bytes <= most


@few
@given(step=steps, batch=batches())
def test_causes_sum_to_the_central_estimate(step: Terms, batch: Batch) -> None:
    prices = priced(step, batch)
    for row in range(len(batch)):
        estimate = prices.estimated(row)
        seconds = [spent for _, spent in estimate.causes]
        assert sum(seconds) == pytest.approx(estimate.step_s, rel=1e-12)
        assert seconds == sorted(seconds, reverse=True)
        for cause, spent in estimate.causes:
            assert prices.cause_s(cause)[row] == spent


@few
@given(step=steps, batch=batches(), cut=st.integers(0, 8), seed=st.integers(0, 9))
def test_a_plan_costs_the_same_alone_in_any_order_and_in_any_part(
    step: Terms, batch: Batch, cut: int, seed: int
) -> None:
    whole = priced(step, batch)
    order = np.random.default_rng(seed).permutation(len(batch))
    for rows in (order, np.arange(cut, len(batch)), order[:1]):
        part = priced(step, some(batch, rows))
        for field in ("step_s", "lower_s", "upper_s", "bound_s", "memory_bytes", "collectives"):
            np.testing.assert_array_equal(getattr(part, field), getattr(whole, field)[rows])
        for place, row in enumerate(rows):
            assert part.estimated(place) == whole.estimated(int(row))


@few
@given(step=steps, batch=batches())
def test_doubling_every_bandwidth_never_slows_a_plan(step: Terms, batch: Batch) -> None:
    slow = priced(step, batch)
    faster = PlainSpeeds(memory_bytes_per_s=1.6e12, host_bytes_per_s=3.0e10, faster=2.0)
    fast = priced(step, batch, faster)
    for field in ("step_s", "lower_s", "upper_s"):
        assert (getattr(fast, field) <= getattr(slow, field) * (1 + 1e-12)).all()


@few
@given(step=steps, batch=batches())
def test_merging_of_equal_terms_changes_nothing(step: Terms, batch: Batch) -> None:
    def halved(count: Sum) -> Sum:
        return tuple(replace(one, coefficient=one.coefficient / 2) for one in count)

    split = replace(
        step,
        kernels=tuple(replace(one, count=halved(one.count)) for one in step.kernels * 2),
        collectives=tuple(
            replace(one, count=halved(one.count)) for one in step.collectives for _ in range(2)
        ),
    )
    together, apart = priced(step, batch), priced(split, batch)
    for field in ("step_s", "lower_s", "upper_s", "bound_s", "memory_bytes", "collectives"):
        np.testing.assert_allclose(getattr(apart, field), getattr(together, field), rtol=1e-12)


@few
@given(step=steps, batch=batches(), n=st.integers(2, 9))
def test_n_trips_cost_n_times_one(step: Terms, batch: Batch, n: int) -> None:
    def again(count: Sum) -> Sum:
        return tuple(replace(one, coefficient=n * one.coefficient) for one in count)

    longer = replace(
        step,
        regions=tuple(replace(one, trips=again(one.trips)) for one in step.regions),
        kernels=tuple(replace(one, count=again(one.count)) for one in step.kernels),
        collectives=tuple(replace(one, count=again(one.count)) for one in step.collectives),
        host_transfers=tuple(replace(one, count=again(one.count)) for one in step.host_transfers),
    )
    once, often = priced(step, batch), priced(longer, batch)
    np.testing.assert_allclose(often.step_s, n * once.step_s, rtol=1e-12)
    np.testing.assert_allclose(often.upper_s, n * once.upper_s, rtol=1e-12)
    np.testing.assert_array_equal(often.memory_bytes, once.memory_bytes)


def plan(**sizes: tuple[int, int]) -> Batch:
    """One mesh: the sizes inside and between granules of its axes."""
    parts = [sizes.get(axis, (1, 1)) for axis in AXES]
    return Batch(
        names=AXES,
        ici=np.array([[ici for ici, _ in parts]]),
        dcn=np.array([[dcn for _, dcn in parts]]),
    )


BARE = Terms(
    active=("a",),
    sampled=(("a", 2),),
    platform="tpu",
    regions=(Region(name="step", trips=times(1)), Region(name="loop", trips=times(10))),
    kernels=(),
    collectives=(),
    points=(),
    argument_bytes=(),
    output_bytes=(),
    alias_bytes=(),
)


def test_a_step_by_hand() -> None:
    """Ten layers that gather weights behind a multiplication, but for the first gather."""
    gather = CollectiveTerm(
        region=1,
        count=times(10),
        kind="all-gather",
        axes=("a",),
        payload_bytes=times(4e8),
        hides=True,
    )
    step = replace(
        BARE,
        kernels=(
            Kernel(
                region=1,
                count=times(10),
                bytes=times(8e8, a=-1),
                matmuls=(
                    Matmul(
                        batch=mono(1), m=mono(1e6, a=-1), n=mono(4096), k=mono(4096), dtype="bf16"
                    ),
                ),
            ),
        ),
        collectives=(
            gather,
            replace(gather, hides=False),
            replace(gather, kind="all-reduce", hides=False),
        ),
        argument_bytes=times(3e9, a=-1),
    )
    estimate = priced(step, plan(a=(4, 1))).estimated(0)
    compute = 10 * 2 * (1e6 / 4) * 4096**2 / 2e14
    one_gather = 4e8 * 3 / 4 / 1e11
    start = 1e-6 * (1 + 3)  # three hops
    overhead = 10 * 2e-7
    assert 10 * (one_gather + start) < compute  # so the gathers that may hide do
    assert dict(estimate.causes) == pytest.approx(
        {
            "compute": compute,
            "ici a": 10 * one_gather + 10 * 2 * one_gather,
            "latency": 20 * start + overhead,
        }
    )
    assert estimate.bound_s == pytest.approx(compute / 2)
    assert estimate.bracket_s[0] == pytest.approx(compute + overhead)
    assert estimate.memory_bytes == 750_000_000
    # Across granules the same reduction waits for the network of the hosts.
    between = dict(priced(step, plan(a=(2, 2))).estimated(0).causes)
    assert between["dcn a"] > between["ici a"] > 0


def test_windows_need_a_ring_of_four_and_a_tpu() -> None:
    step = replace(
        BARE,
        kernels=(
            Kernel(
                region=1,
                count=times(10),
                bytes=times(8e8),
                windowed=(Windowed(axes=("a",), bytes=times(4e8)),),
            ),
        ),
        collectives=(
            CollectiveTerm(
                region=1,
                count=times(10),
                kind="reduce-scatter",
                axes=("a",),
                payload_bytes=times(1e9),
                hides=False,
                windowed=True,
            ),
        ),
    )
    kernel, scatter = 10 * 8e8 / 8e11, 10 * 1e9 / 1e11

    def seconds(one: Terms, devices: int) -> dict[str, float]:
        return dict(priced(one, plan(a=(devices, 1))).estimated(0).causes)

    assert seconds(step, 2)["memory"] == pytest.approx(kernel)
    # Over the whole mesh, what is no ring is summed by all and scattered by none.
    assert seconds(step, 2)["ici a"] == pytest.approx(2 * scatter / 2)
    four = seconds(step, 4)
    # Two shards at a time: two steps, of which one adds to the result again.
    assert four["memory"] == pytest.approx(kernel + 10 * 4e8 / 8e11)
    # Five shards go two ways, each over a sixth of the links, behind this product alone.
    ring = 10 * 5 / 2 * (1e9 / 4) / (1e11 / 6)
    assert four["ici a"] + four["memory"] == pytest.approx(ring, rel=1e-2)
    beside = replace(
        step, kernels=(*step.kernels, Kernel(region=1, count=times(1), bytes=times(8e10)))
    )
    more = seconds(beside, 4)
    assert more["ici a"] == pytest.approx(four["ici a"], rel=1e-3)
    elsewhere = seconds(replace(step, platform="gpu"), 4)
    assert elsewhere["memory"] == pytest.approx(kernel)
    assert elsewhere["ici a"] == pytest.approx(scatter * 3 / 4)


def test_what_hides_over_the_same_axes_waits_for_each_other() -> None:
    """A ring and an all-reduce each hide behind one product, but not both of them."""
    ring = CollectiveTerm(
        region=1,
        count=times(10),
        kind="all-gather",
        axes=("a",),
        payload_bytes=times(3e7),
        hides=False,
        windowed=True,
    )
    reduced = replace(
        ring, kind="all-reduce", payload_bytes=times(9.5e7), hides=True, windowed=False
    )
    product = Kernel(
        region=1,
        count=times(10),
        bytes=times(8e8),
        windowed=(Windowed(axes=("a",), bytes=times(4e8)),),
    )
    step = replace(BARE, kernels=(product,), collectives=(ring, reduced))
    mesh = plan(a=(4, 1))
    compute, sums = 0.015, 10 * 9.5e7 * 2 * 3 / 4 / 1e11
    rings = 10 * 5 / 2 * (3e7 / 4) / (1e11 / 6)
    for one in (ring, reduced):
        alone = priced(replace(step, collectives=(one,)), mesh).estimated(0)
        assert alone.step_s == pytest.approx(compute, rel=0.01)
    both = priced(step, mesh).estimated(0)
    assert rings + sums > compute
    assert both.step_s == pytest.approx(rings + sums, rel=0.01)
    assert both.bracket_s[0] == both.step_s
    assert dict(both.causes)["ici a"] == pytest.approx(rings + sums - compute, rel=0.1)


def test_a_ring_hides_where_its_product_stands_and_a_gather_before_it() -> None:
    gather = CollectiveTerm(
        region=0,
        count=times(1),
        kind="all-gather",
        axes=("a",),
        payload_bytes=times(3e8),
        hides=True,
        windowed=True,
        ring_region=1,
    )
    product = Kernel(
        region=1,
        count=times(1),
        bytes=times(8e10),
        windowed=(Windowed(axes=("a",), bytes=times(4e8), adds=False),),
    )
    step = replace(BARE, kernels=(product,), collectives=(gather,))

    def exposed(one: Terms, devices: int) -> float:
        return dict(priced(one, plan(a=(devices, 1))).estimated(0).causes).get("ici a", 0.0)

    # Of two devices there is no ring, and before the product nothing hides the gather.
    assert exposed(step, 2) == pytest.approx(3e8 / 2 / 1e11)
    assert exposed(step, 4) == 0.0
    before = replace(step, kernels=(product, replace(product, region=0, windowed=())))
    assert exposed(before, 2) == 0.0


def test_small_buffers_stay_on_the_chip() -> None:
    near = Near(buffer_bytes=mono(1e8, a=-1), bytes=times(6e8, a=-1))
    kernel = Kernel(region=0, count=times(1), bytes=(*times(8e8), *near.bytes), near=(near,))
    step = replace(BARE, kernels=(kernel,))
    speeds = PlainSpeeds(near_bytes=3e7, kernel_overhead_s=0.0)

    def memory(devices: int, speeds: PlainSpeeds) -> float:
        return priced(step, plan(a=(devices, 1)), speeds).estimated(0).step_s

    assert memory(2, speeds) == pytest.approx((8e8 + 3e8) / 8e11)
    assert memory(4, speeds) == pytest.approx(8e8 / 8e11)
    assert memory(4, PlainSpeeds(kernel_overhead_s=0.0)) == pytest.approx((8e8 + 1.5e8) / 8e11)


def test_terms_that_do_not_hold_are_marked() -> None:
    step = replace(
        BARE,
        active=("a", "b"),
        sampled=(("a", 2), ("b", 3)),
        guards=(DivisibilityGuard(size=12, axes=("a", "b")),),
        uncounted=(Uncounted(what="custom call f", why="no cost estimate", source="m.py:3"),),
    )
    batch = Batch(
        names=AXES,
        ici=np.array([[2, 2, 1], [4, 2, 1], [2, 3, 1], [2, 1, 1]]),
        dcn=np.ones((4, 3), np.int64),
    )
    by_set = {step.active: step}
    prices = price_on(by_set, batch, routes_of=simple_routes, speeds=PlainSpeeds())
    assert prices.needs_own.tolist() == [False, True, False, True]
    assert np.isnan(prices.step_s).tolist() == [False, True, False, True]
    assert prices.estimated(0).uncounted == ("custom call f (m.py:3): no cost estimate",)
    with pytest.raises(ValueError, match="plan 3: it needs a propagation of its own"):
        prices.estimated(3)
    # Sizes baked into shapes: only the sampled ones hold, even where a guard says otherwise.
    fixed = {
        step.active: replace(step, fixed=("b",), guards=(DivisibilityGuard(size=5, axes=("a",)),))
    }
    prices = price_on(fixed, batch, routes_of=simple_routes, speeds=PlainSpeeds())
    assert prices.needs_own.tolist() == [True, True, False, True]
    assert not prices.estimated(2).own_propagation
    alone = {step.active: replace(step, fixed=("a", "b"))}
    prices = price_on(alone, batch, routes_of=simple_routes, speeds=PlainSpeeds())
    assert prices.estimated(2).own_propagation


def test_an_empty_batch_and_one_device() -> None:
    none = Batch(names=AXES, ici=np.zeros((0, 3), np.int64), dcn=np.zeros((0, 3), np.int64))
    assert len(priced(BARE, none)) == 0
    assert priced(BARE, plan()).estimated(0).step_s == 0.0


def test_a_cluster_of_gpus_and_one_with_twice_the_bandwidth() -> None:
    absent = parse_target("gpu-h100-64", {}).absent
    assert absent is not None
    fabric, names = absent.fabric, ("dp", "fsdp", "tp")
    sets = [tuple(itertools.compress(names, kept)) for kept in itertools.product((0, 1), repeat=3)]
    by_set = {active: dense_terms(active, platform="gpu") for active in sets}
    batch, layouts = powers_of_two(6, 3, names), Layouts(shapes=(), spans=())
    chip = replace(
        fabric.chip,
        hbm_bytes_per_s=2 * fabric.chip.hbm_bytes_per_s,
        link_bytes_per_s=2 * fabric.chip.link_bytes_per_s,
        dcn_bytes_per_s=2 * fabric.chip.dcn_bytes_per_s,
    )
    both = [
        price(
            by_set,
            batch,
            hardware=HardwareModel(
                fabric=one, layouts=layouts, speeds=datasheet_speeds(one.chip, one)
            ),
        )
        for one in (fabric, replace(fabric, chip=chip))
    ]
    for prices in both:
        assert not prices.needs_own.any()
        assert (prices.bound_s > 0).all()
        assert (prices.bound_s <= prices.lower_s).all()
    slow, fast = both
    assert (fast.step_s <= slow.step_s * (1 + 1e-12)).all()
    assert (fast.cause_s("dcn dp")[batch.dcn[:, 0] > 1] > 0).all()


def test_many_plans_cost_what_they_cost_one_by_one() -> None:
    """A step of real size on 4,950 plans: every shortcut of the batch is taken."""
    names = ("dp", "fsdp", "ep", "tp", "sp")
    sets = [tuple(itertools.compress(names, kept)) for kept in itertools.product((0, 1), repeat=5)]
    by_set = {active: dense_terms(active) for active in sets}
    batch = powers_of_two(9, 2, names)
    calls = []

    def counted(meshes: Batch, axes: tuple[str, ...]):
        calls.append((axes, len(meshes)))
        return simple_routes(meshes, axes)

    whole = price_on(by_set, batch, routes_of=counted, speeds=PlainSpeeds())
    assert len(calls) == len({axes for axes, _ in calls})  # once for each set of axes
    assert max(meshes for _, meshes in calls) <= len(np.unique(batch.ici, axis=0)) * 3
    rows = np.arange(0, len(batch), 331)
    apart = price_on(by_set, some(batch, rows), routes_of=simple_routes, speeds=PlainSpeeds())
    np.testing.assert_array_equal(apart.step_s, whole.step_s[rows])
    np.testing.assert_array_equal(apart.memory_bytes, whole.memory_bytes[rows])
    for row in rows[:4]:
        active = tuple(np.array(names)[batch.sizes[row] > 1].tolist())
        expected = reference(by_set[active], batch, int(row), PlainSpeeds())
        assert whole.step_s[row] == pytest.approx(expected.step_s, rel=1e-9)
