"""Which plans are expected to fit devices that are not here."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failed, Outcome, OutOfMemory
from automesh.tuner.choose.memory_belief import MemoryBelief, large_last, too_large_notice
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from tests.support.paths import DATA
from tests.support.samples.results_samples import plan as made_up
from tests.tuner.choose.test_ahead_of_time import (
    GIB,
    KNOWN,
    PLANS,
    ROOM,
    as_known,
    compiled,
    estimated,
)

FULL, DOTS = (("remat", "full"),), (("remat", "dots"),)
OTHERS = [replace(plan, knobs=DOTS) for plan in PLANS]


def sized(memory: float) -> Estimated:
    return replace(estimated(1.0), memory_bytes=int(memory * GIB))


def left_out(
    plans: Sequence[Plan],
    outcomes: Mapping[Plan, Outcome],
    estimates: Mapping[Plan, Estimated],
    room: DeviceMemory = ROOM,
) -> set[Plan]:
    belief = MemoryBelief.of(outcomes, estimates, room)
    return set(plans) - set(belief.may_fit(plans))


def test_plans_that_seem_too_large_come_last_in_their_order() -> None:
    estimates = {
        plan: replace(estimated(1.0), memory_bytes=(17 if number < 2 else 18) * GIB)
        for number, plan in enumerate(PLANS[:4])
    }
    found = large_last([PLANS[2], PLANS[4], PLANS[0], PLANS[3]], estimates, ROOM)
    assert found == (PLANS[4], PLANS[0], PLANS[2], PLANS[3])
    assert large_last(PLANS, estimates, NO_LIMIT) == tuple(PLANS)


@pytest.mark.parametrize("of_others", [True, False])
def test_plans_far_above_what_compilers_needed_are_left_out(of_others: bool) -> None:
    sizes = [10, 12, 14, 16, 18, 20, 21, 24, 25, 26, 28, 90]
    estimates = {plan: sized(size) for plan, size in zip(PLANS, sizes, strict=True)}
    estimates |= {plan: estimates[twin] for plan, twin in zip(OTHERS, PLANS, strict=True)}
    # The compiler needs 0.8 of the estimate. Of plans with the same knobs it is then believed to
    # need at least 0.71 of it, of others 0.6: 15 GiB of 21.2 and 25.
    known = {
        plan: ROOM.judged(compiled(int(0.8 * estimates[plan].memory_bytes))) for plan in PLANS[:5]
    }
    asked, first = (OTHERS, 9) if of_others else (PLANS, 7)
    assert left_out(asked, known, estimates) == set(asked[first:])
    assert left_out(asked, known, estimates, NO_LIMIT) == set()
    few = dict(list(known.items())[:4])
    assert left_out(asked, few, estimates) == set()
    # The memory of this machine says nothing of that of the device.
    killed = OutOfMemory(stage="compile", needed_bytes=900 * GIB, limit_bytes=3, detail="")
    assert left_out(asked, few | {PLANS[11]: killed}, estimates) == set()


def test_what_is_said_of_plans_that_are_left_out() -> None:
    assert too_large_notice(1) == "left out 1 plan that is not expected to fit a device"
    assert too_large_notice(2).startswith("left out 2 plans that are not")


def test_one_answer_says_enough_once_it_is_known_how_neighbours_scatter() -> None:
    plans = [*PLANS, *OTHERS]
    estimates = {plan: sized(20 if plan in PLANS else 19) for plan in plans}
    known: dict[Plan, Outcome] = {plan: compiled(12 * GIB) for plan in PLANS[:5]}
    assert left_out(plans, known, estimates) == set()
    known[OTHERS[0]] = ROOM.judged(compiled(18 * GIB))
    assert left_out(plans, known, estimates) == set(OTHERS)


def test_where_neighbours_scatter_nothing_is_believed_of_the_next() -> None:
    estimates = {plan: sized(20) for plan in PLANS}
    needed = (6, 20, 7, 18, 9)
    known = {
        plan: ROOM.judged(compiled(one * GIB)) for plan, one in zip(PLANS, needed, strict=False)
    }
    assert left_out(PLANS[5:], known, estimates) == set()


def test_the_smallest_of_those_that_seem_too_large_goes_ahead() -> None:
    estimates = {plan: sized(30 - number) for number, plan in enumerate(PLANS)}
    estimates |= {plan: sized(40 + number) for number, plan in enumerate(OTHERS)}
    order = [*PLANS, *OTHERS]
    outcomes: dict[Plan, Outcome] = {}

    def asked() -> tuple[Plan, ...]:
        worth = MemoryBelief.of(outcomes, estimates, ROOM).worth_asking(order)
        return tuple(plan for plan in worth if plan not in outcomes)

    assert asked() == (PLANS[11], OTHERS[0])
    outcomes[PLANS[11]] = Failed(stage="compile", reason="it says nothing of memory")
    assert asked() == (PLANS[10], OTHERS[0])
    outcomes[PLANS[10]] = compiled(10 * GIB)
    assert asked() == (*PLANS[:10], OTHERS[0])
    # What is not estimated to be too large needs nobody to go ahead.
    small = {plan: sized(16) for plan in order}
    assert MemoryBelief.of({}, small, ROOM).worth_asking(order) == tuple(order)
    assert MemoryBelief.of({}, {}, ROOM).worth_asking(order) == tuple(order)


@given(KNOWN, st.lists(st.integers(1, 60), min_size=len(PLANS), max_size=len(PLANS)))
@settings(max_examples=60)
def test_what_the_compiler_lets_pass_is_never_left_out(
    outcomes: list[Outcome | None], sizes: list[int]
) -> None:
    known = as_known(outcomes)
    estimates = {plan: sized(size) for plan, size in zip(PLANS, sizes, strict=True)}
    fitting = {plan for plan, one in known.items() if isinstance(one, Compiled)}
    assert not fitting & left_out(PLANS, known, estimates)
    worth = MemoryBelief.of(known, estimates, ROOM).worth_asking(PLANS)
    assert set(known) <= set(worth)
    # It ends: as long as something may fit there is something to ask.
    assert len(worth) > len(known) or set(PLANS) - set(known) <= left_out(PLANS, known, estimates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one search estimated and its compiler said, in the order of the estimated times."""

    estimates: Mapping[Plan, Estimated]
    needed_bytes: Mapping[Plan, int]

    @staticmethod
    def read(name: str, *, efforts: Sequence[str] = ("low", "default")) -> Recorded:
        estimates: dict[Plan, Estimated] = {}
        needed: dict[Plan, int] = {}
        with (DATA / "memory" / f"{name}.csv").open() as lines:
            for row in csv.DictReader(lines):
                if row["effort"] not in efforts:
                    continue
                plan = made_up(
                    row["mesh"], remat=row["remat"], microbatches=int(row["microbatches"])
                )
                estimates[plan] = sized(int(row["estimated_bytes"]) / GIB)
                needed[plan] = int(row["needed_bytes"])
        return Recorded(estimates=estimates, needed_bytes=needed)

    def searched(self, room: DeviceMemory) -> tuple[int, int]:
        """Asks for one plan after the other.

        Returns:
          How many fit, and how many did not.

        Raises:
          AssertionError: a plan that fits was never asked for.
        """
        order = large_last(list(self.estimates), self.estimates, room)
        outcomes: dict[Plan, Outcome] = {}
        while True:
            worth = MemoryBelief.of(outcomes, self.estimates, room).worth_asking(order)
            asked = [plan for plan in worth if plan not in outcomes]
            if not asked:
                break
            outcomes[asked[0]] = room.judged(compiled(self.needed_bytes[asked[0]]))
        fits = {plan for plan, needed in self.needed_bytes.items() if needed <= room.free_bytes}
        assert fits <= set(outcomes)
        return len(fits), len(outcomes) - len(fits)


@pytest.mark.parametrize(
    ("name", "limit_bytes", "fit", "failed"),
    [
        # 8B on 64 chips: without what neighbours say all 40 that did not fit were compiled.
        ("dense_lm_8b_tpu-v5p-128", 102_789_304_811, 11, 1),
        ("dense_lm_1b_tpu-v5litepod-16", 16_909_336_576, 22, 0),
    ],
)
def test_recorded_searches_waste_few_compiles(
    name: str, limit_bytes: int, fit: int, failed: int
) -> None:
    """At most one compile in five on plans that do not fit."""
    room = DeviceMemory(limit_bytes=limit_bytes, reserve_bytes=2**28)
    assert Recorded.read(name).searched(room) == (fit, failed)
    assert 5 * failed <= fit + failed


@pytest.mark.parametrize("effort", ["low", "default"])
@pytest.mark.parametrize("name", ["dense_lm_8b_tpu-v5p-128", "dense_lm_1b_tpu-v5litepod-16"])
def test_no_plan_that_fits_is_missed_whatever_the_limit(name: str, effort: str) -> None:
    # What fits at low effort may not at default effort, and then is rightly left out.
    recorded = Recorded.read(name, efforts=[effort])
    for needed in recorded.needed_bytes.values():
        recorded.searched(DeviceMemory(limit_bytes=needed + 1))


def test_compiles_correct_the_estimates_of_plans_with_the_same_knobs() -> None:
    first, second, other = PLANS[0], PLANS[1], replace(PLANS[1], knobs=(("remat", "other"),))
    estimates = {plan: sized(4) for plan in (first, second, other)}
    needs = compiled(1.0)
    needs = replace(needs, memory=replace(needs.memory, peak_bytes=2 * GIB))
    belief = MemoryBelief.of({first: needs}, estimates, ROOM)
    assert belief.expected_bytes(second) == pytest.approx(2 * GIB)
    assert belief.expected_bytes(other) == 4 * GIB


def test_an_estimate_that_is_a_lower_bound_is_large_for_nobody() -> None:
    plan = PLANS[0]
    huge = replace(estimated(1.0), memory_bytes=1 << 60, memory_interval=(1 << 59, 1 << 61))
    assert MemoryBelief.of({}, {plan: huge}, ROOM).seems_large(plan)
    unknown = replace(huge, memory_interval=(1 << 59, 0))
    assert not MemoryBelief.of({}, {plan: unknown}, ROOM).seems_large(plan)
