"""Compiler options that change what a plan is estimated to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from automesh.cost.pipeline.terms import PipelineTerms, ScheduleText
from automesh.cost.priced_options import pipeline_under_options, under_options
from automesh.cost.pricing import PlanPrices, price_on
from automesh.cost.terms import CollectiveTerm, Kernel, Monomial, Region, Sum, Terms, Windowed
from automesh.cost.windowed import THRESHOLDS, for_windows, windows
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import MeshAxis, Plan, Scalar
from automesh.mesh.plan_arrays import Batch, batch_of
from automesh.tuner.estimate.prices import (
    price_pipeline_with_options,
    price_with_options,
    unpriced_notice,
)
from tests.support.samples.cost_samples import PlainSpeeds, simple_routes, stage

OPTION = THRESHOLDS["tpu"]
NO_LAYOUTS = Layouts(shapes=(), spans=())


def times(value: float, **powers: int) -> Sum:
    return (Monomial(coefficient=value, powers=tuple(sorted(powers.items()))),)


def step(platform: str = "tpu") -> Terms:
    """A product around a gather of 64 MiB, split over `b` as well."""
    whole = times(2.0**26, b=-1)
    return Terms(
        active=("a", "b"),
        sampled=(("a", 2), ("b", 2)),
        platform=platform,
        regions=(Region(name="step", trips=times(1)),),
        kernels=(
            Kernel(
                region=0,
                count=times(1),
                bytes=times(8e8),
                windowed=(Windowed(axes=("a",), bytes=times(4e8), whole_bytes=whole),),
            ),
        ),
        collectives=(
            CollectiveTerm(
                region=0,
                count=times(1),
                kind="all-gather",
                axes=("a",),
                payload_bytes=whole,
                hides=True,
                windowed=True,
                whole_bytes=whole,
            ),
        ),
        points=(),
        argument_bytes=(),
        output_bytes=(),
        alias_bytes=(),
    )


def plan(a: int, b: int, **options: Scalar) -> Plan:
    axes = (MeshAxis(name="a", ici=a), MeshAxis(name="b", ici=b))
    return Plan(axes=axes, knobs=(), compiler_options=tuple(options.items()))


def price(terms: Mapping[tuple[str, ...], Terms], batch: Batch, layouts: Layouts) -> PlanPrices:
    return price_on(terms, batch, routes_of=simple_routes, speeds=PlainSpeeds())


def memory_s(*plans: Plan, platform: str = "tpu") -> list[float]:
    """What the plans spend on memory: rings read an activation again and again."""
    terms = {("a", "b"): step(platform)}
    prices = price_with_options(price, terms, batch_of(plans), NO_LAYOUTS, plans)
    return [dict(prices.estimated(row).causes)["memory"] for row in range(len(plans))]


def test_plans_that_differ_in_the_threshold_have_their_own_prices() -> None:
    default, off, some = memory_s(
        plan(4, 2), plan(4, 2, **{OPTION: 1_000_000}), plan(4, 2, **{OPTION: 32})
    )
    plain = 8e8 / 8e11
    assert off == pytest.approx(plain)
    assert default == pytest.approx(plain + 4e8 / 8e11)
    assert some == default  # 64 MiB over two devices are 32.


def test_the_threshold_is_compared_with_what_is_gathered_on_that_mesh() -> None:
    option: dict[str, Scalar] = {OPTION: 32}
    large, small = memory_s(plan(4, 2, **option), plan(4, 4, **option))
    assert large > small == pytest.approx(8e8 / 8e11)


def test_a_batch_of_several_options_is_priced_as_each_alone() -> None:
    plans = [
        plan(a, b, **options)
        for a in (2, 4, 8)
        for b in (2, 4)
        for options in ({}, {OPTION: 0}, {OPTION: 20.5}, {OPTION: 1_000_000}, {"xla_other": True})
    ]
    together = memory_s(*plans)
    assert together == [memory_s(one)[0] for one in plans]
    assert len(set(together)) > 2


def test_other_platforms_have_no_such_option() -> None:
    assert memory_s(plan(4, 2), platform="gpu") == memory_s(
        plan(4, 2, **{OPTION: 1_000_000}), platform="gpu"
    )


@pytest.mark.parametrize("value", ["large", True])
def test_what_is_no_number_is_left_to_the_compiler(value: Scalar) -> None:
    assert under_options(step(), ((OPTION, value),)) == step()


def test_meshes_that_need_terms_of_their_own_stay_marked() -> None:
    fixed = replace(step(), fixed=("a",))
    plans = [plan(2, 2), plan(4, 2), plan(2, 4, **{OPTION: 1}), plan(8, 2, **{OPTION: 1})]
    prices = price_with_options(price, {("a", "b"): fixed}, batch_of(plans), NO_LAYOUTS, plans)
    np.testing.assert_array_equal(prices.needs_own, [False, True, False, True])


def pipeline_of(terms: Terms) -> PipelineTerms:
    """Two ranks of one kind of stage."""
    schedule = ScheduleText(name="1f1b", num_ranks=2, num_microbatches=4, num_stages=2)
    return PipelineTerms(
        axis="pp", schedule=schedule, kinds=(stage(terms, ("F", "B")),), stages=(0, 0)
    )


def test_every_program_of_a_pipeline_is_under_the_options() -> None:
    pipeline, wanted = pipeline_of(step()), under_options(step(), ((OPTION, 8),))
    assert wanted != step()
    assert pipeline_under_options(pipeline, ((OPTION, 8),)) == pipeline_of(wanted)
    assert pipeline_under_options(pipeline, (("xla_other", 8),)) == pipeline


def test_plans_with_a_pipeline_have_the_price_of_their_options() -> None:
    plans = [plan(4, 2), plan(4, 2, **{OPTION: 1_000_000}), plan(2, 4)]

    def price_pipeline(
        pipeline: PipelineTerms, where: Terms, batch: Batch, layouts: Layouts
    ) -> PlanPrices:
        assert where.active == ("a", "b")
        (one,) = pipeline.kinds
        return price({("a", "b"): one.finish}, batch, layouts)

    found = (pipeline_of(step()), step())
    prices = price_pipeline_with_options(price_pipeline, found, batch_of(plans), NO_LAYOUTS, plans)
    told = [dict(prices.estimated(row).causes)["memory"] for row in range(len(plans))]
    assert told == memory_s(*plans)
    assert told[0] > told[1]


def test_options_without_a_price_are_named_once() -> None:
    plans = [plan(4, 2), plan(4, 2, xla_one=1, **{OPTION: 4}), plan(2, 4, xla_one=2, xla_two=True)]
    said = unpriced_notice(plans, "tpu")
    assert "`xla_one` and `xla_two`" in said
    assert OPTION not in said
    assert OPTION in unpriced_notice(plans, "gpu")
    assert unpriced_notice(plans[:1], "tpu") == ""


@pytest.mark.parametrize(
    ("ring", "intensity", "is_ring"),
    [
        (2, 1e9, False),
        (4, 999.0, False),
        (4, 1000.0, True),
        (16, 251.0, True),
        (16, 249.0, False),
        (32, 1e9, True),
        (64, 1e9, False),
    ],
)
def test_a_ring_must_pay_for_its_two_more_steps(ring: int, intensity: float, is_ring: bool) -> None:
    chip = replace(PlainSpeeds(), window_flops_per_byte=4000.0)
    terms = for_windows(step(), chip)
    found = windows(terms, np.array([ring]), np.array([1e9]), np.array([intensity]))
    assert found.tolist() == [is_ring]


def test_where_nothing_is_known_of_the_chip_every_ring_pays() -> None:
    terms = for_windows(step(), PlainSpeeds())
    assert windows(terms, np.array([4]), np.array([1.0]), np.array([0.0])).tolist() == [True]
