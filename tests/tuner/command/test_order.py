"""The order in which plans are tried that nothing is known of."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from automesh.mesh.axes import Knobs, Plan
from automesh.tuner.command.order import PlanOrder
from automesh.tuner.command.space import space_of
from automesh.tuner.command.template import parse_template

TEMPLATE = parse_template("x {dp} {fsdp} {tp}")


def plans(devices: int, knobs: tuple[Knobs, ...] = ((),)) -> list[Plan]:
    found = space_of(TEMPLATE).enumerate(
        TEMPLATE, num_devices=devices, num_granules=1, platform="cpu"
    )
    return [Plan(axes=plan.axes, knobs=one) for one in knobs for plan in found.legal]


def tried(order: PlanOrder, seconds: dict[Plan, float | None], most: int = 10**6) -> list[Plan]:
    """What is tried, if each plan takes what `seconds` says."""
    known: dict[Plan, float | None] = {}
    while len(known) < most and (plan := order.next(known)) is not None:
        assert plan not in known
        known[plan] = seconds[plan]
    return list(known)


@given(
    st.sampled_from([1, 2, 6, 8, 64]),
    st.data(),
)
def test_each_plan_is_tried_once_and_a_stop_changes_nothing(
    devices: int, data: st.DataObject
) -> None:
    knobs = data.draw(st.sampled_from([((),), ((("remat", "none"),), (("remat", "full"),))]))
    all_plans = plans(devices, knobs)
    seconds = {plan: data.draw(st.none() | st.floats(0.1, 9.0)) for plan in all_plans}
    baseline = data.draw(st.lists(st.sampled_from(all_plans), max_size=1))
    order = PlanOrder(all_plans, baseline)
    found = tried(order, seconds)
    assert sorted(found, key=str) == sorted(all_plans, key=str)
    assert found[: len(baseline)] == baseline
    stop = data.draw(st.integers(0, len(found)))
    known = {plan: seconds[plan] for plan in found[:stop]}
    again = PlanOrder(all_plans, baseline).next(known)
    assert again == (found[stop] if stop < len(found) else None)


def test_the_first_lie_apart() -> None:
    found = tried(PlanOrder(plans(64), ()), dict.fromkeys(plans(64), 1.0), 3)
    assert [plan.mesh for plan in found] == ["dp:64", "fsdp:64", "tp:64"]


def test_the_best_is_among_the_first_wherever_it_lies() -> None:
    all_plans = plans(64)
    assert len(all_plans) == 28
    places: list[int] = []
    for best in all_plans:
        seconds: dict[Plan, float | None] = {
            plan: 1.0
            + sum(abs(math.log2(one.size / other.size)) for one, other in zip(plan.axes, best.axes))
            for plan in all_plans
        }
        places.append(tried(PlanOrder(all_plans, ()), seconds).index(best))
    # In any order it would be the fourteenth on average.
    assert max(places) < 10
    assert statistics.mean(places) < 5


def test_what_failed_is_no_one_s_neighbour() -> None:
    all_plans = plans(8)
    found = tried(PlanOrder(all_plans, ()), dict.fromkeys(all_plans))
    assert len(found) == len(all_plans)
