"""Which plans are compiled at low effort, which at default effort, and when nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.hardware import chip_for
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Compiled, Estimated, Failed, Outcome, OutOfMemory, TimedOut
from automesh.tuner.choose.ahead_of_time import (
    challengers,
    interleaved,
    pairs_in_order,
    surely_fits,
    to_compile,
    to_screen,
)
from automesh.tuner.choose.state import SearchState
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from tests.support.samples.storage_cases import compiled as compiled_as

GIB = 2**30
ROOM = DeviceMemory(limit_bytes=16 * GIB, reserve_bytes=GIB)
PLANS = [Plan(axes=(MeshAxis(name="dp", ici=number + 1),)) for number in range(12)]


def compiled(peak_bytes: int, *, fingerprint: str = "", step_s: float = 1.0) -> Compiled:
    made = compiled_as(step_s, fingerprint or f"program {peak_bytes}")
    return replace(made, memory=replace(made.memory, peak_bytes=peak_bytes))


def estimated(step_s: float, compute: float = 0.5) -> Estimated:
    return Estimated(
        step_s=step_s,
        bracket_s=(step_s / 2, 2 * step_s),
        bound_s=0.0,
        memory_bytes=GIB,
        causes=(("compute", compute * step_s), ("ici tp", (1 - compute) * step_s)),
    )


def known_of(
    estimates: dict[Plan, Estimated],
    screened: dict[Plan, Outcome],
    done: dict[Plan, Outcome],
    plans: list[Plan] = PLANS,
) -> SearchState:
    return SearchState(
        plans=plans,
        estimates=estimates,
        programs=screened,
        results=done,
        baseline=(),
        usual=plans[0],
        chip=chip_for("TPU v5e", "tpu"),
        top=4,
        device_memory_bytes=0,
        is_replayed=True,
    )


OUTCOMES = st.one_of(
    st.none(),
    st.builds(
        lambda peak, program: compiled(peak * GIB, fingerprint=f"p{program}"),
        st.integers(1, 18),
        st.integers(0, 6),
    ),
    st.just(OutOfMemory(stage="compile", needed_bytes=20, limit_bytes=16, detail="")),
    st.just(Failed(stage="build", reason="no")),
)
KNOWN = st.lists(OUTCOMES, min_size=len(PLANS), max_size=len(PLANS))


def as_known(outcomes: list[Outcome | None]) -> dict[Plan, Outcome]:
    """What is stored and read again: judged by the room that there is."""
    pairs = zip(PLANS, outcomes, strict=True)
    return {plan: ROOM.judged(one) for plan, one in pairs if one is not None}


@pytest.mark.parametrize(
    ("peak_bytes", "fits"),
    [(12 * GIB, True), (12 * GIB + 1, False), (15 * GIB, False), (GIB, True)],
)
def test_low_effort_shows_that_a_plan_fits_below_three_quarters_only(
    peak_bytes: int, fits: bool
) -> None:
    assert surely_fits(compiled(peak_bytes), ROOM) is fits


def test_a_large_reserve_counts_as_well() -> None:
    assert not surely_fits(compiled(9 * GIB), replace(ROOM, reserve_bytes=8 * GIB))
    assert surely_fits(compiled(99 * GIB), NO_LIMIT)
    assert not surely_fits(OutOfMemory(stage="", needed_bytes=0, limit_bytes=0, detail=""), ROOM)


@settings(max_examples=200, deadline=None)
@given(outcomes=KNOWN, wanted=st.integers(1, 8))
def test_screening_takes_a_prefix_that_may_have_enough(
    outcomes: list[Outcome | None], wanted: int
) -> None:
    known = as_known(outcomes)
    chosen = to_screen(PLANS, known, ROOM, wanted=wanted)
    assert list(chosen) == PLANS[: len(chosen)]
    fits = {
        one.fingerprint
        for plan in chosen
        if isinstance(one := known.get(plan), Compiled) and surely_fits(one, ROOM)
    }
    unknown = sum(plan not in known for plan in chosen)
    assert len(fits) + unknown <= wanted
    assert len(fits) + unknown == wanted or len(chosen) == len(PLANS)


@settings(max_examples=200, deadline=None)
@given(screened=KNOWN, outcomes=KNOWN, wanted=st.integers(1, 8))
def test_what_low_effort_rejects_is_never_compiled(
    screened: list[Outcome | None], outcomes: list[Outcome | None], wanted: int
) -> None:
    low, done = as_known(screened), as_known(outcomes)
    chosen = to_compile(PLANS, low, done, wanted=wanted)
    assert len(set(chosen)) == len(chosen)
    assert not any(isinstance(low.get(plan), OutOfMemory | Failed) for plan in chosen)
    programs = {
        one.fingerprint
        for plan in chosen
        if isinstance(one := done.get(plan, low.get(plan)), Compiled)
    }
    hoped = sum(plan not in done and plan not in low for plan in chosen)
    assert len(programs) + hoped <= wanted
    rejected = [plan for plan in PLANS if isinstance(low.get(plan), OutOfMemory | Failed)]
    all_taken = len(chosen) + len(rejected) == len(PLANS)
    assert len(programs) + hoped == wanted or all_taken


def test_the_order_is_kept_and_what_was_not_seen_comes_last() -> None:
    low = {PLANS[2]: compiled(GIB), PLANS[3]: compiled(2 * GIB)}
    assert to_compile(PLANS, low, {}, wanted=3) == (PLANS[2], PLANS[3], PLANS[0])


def test_options_do_not_crowd_out_meshes() -> None:
    def with_option(plan: Plan) -> Plan:
        return replace(plan, compiler_options=(("xla_a", 1),))

    order = [one for plan in PLANS[:5] for one in (plan, with_option(plan))]
    a, b, c, d, e = PLANS[:5]
    found = interleaved(order)
    assert found[:3] == (a, b, c)
    assert set(found[3:5]) == {d, with_option(a)}
    assert sorted(map(str, found)) == sorted(map(str, order))
    assert interleaved(PLANS) == tuple(PLANS) and e in found


def test_a_program_counts_once() -> None:
    low: dict[Plan, Outcome] = {plan: compiled(GIB, fingerprint="one") for plan in PLANS[:4]}
    assert to_compile(PLANS[:4], low, low, wanted=2) == tuple(PLANS[:4])
    assert known_of({}, low, {PLANS[0]: low[PLANS[0]]}, PLANS[:4]).left() == ()


def test_replays_correct_the_estimates_of_the_others() -> None:
    estimates = {
        plan: estimated(1.0 + number / 10, compute=0.1 + number / 20)
        for number, plan in enumerate(PLANS)
    }
    done: dict[Plan, Outcome] = {
        plan: compiled(GIB, fingerprint=str(plan), step_s=2 * estimates[plan].step_s)
        for plan in PLANS[:6]
    }
    state = known_of(estimates, {}, done)
    assert state.view().step_s(PLANS[9]) == pytest.approx(2 * estimates[PLANS[9]].step_s, rel=0.05)
    assert {one.plan for one in state.chances(state.best_s())} == set(PLANS[6:])
    assert challengers(state, state.left()) == ()
    assert pairs_in_order(estimates, done) == (15, 15)


def test_what_may_still_win_is_a_challenger() -> None:
    estimates = {plan: estimated(1.0 + number / 1000) for number, plan in enumerate(PLANS)}
    noise = (1.0, 1.2, 0.9, 1.15, 0.95)
    done: dict[Plan, Outcome] = {
        plan: compiled(GIB, fingerprint=str(plan), step_s=factor)
        for plan, factor in zip(PLANS, noise, strict=False)
    }
    state = known_of(estimates, {}, done)
    found = challengers(state, state.left())
    assert found and set(found) <= set(PLANS[5:])


def test_a_model_of_two_replays_challenges_nobody() -> None:
    estimates = {plan: estimated(1.0) for plan in PLANS}
    done: dict[Plan, Outcome] = {plan: compiled(GIB, fingerprint=str(plan)) for plan in PLANS[:2]}
    state = known_of(estimates, {}, done)
    assert challengers(state, state.left()) == ()
    assert known_of({}, {}, {}).view().refinement is None


def test_pairs_that_are_ties_are_not_counted() -> None:
    estimates = {PLANS[0]: estimated(1.0), PLANS[1]: estimated(2.0), PLANS[2]: estimated(3.0)}
    done: dict[Plan, Outcome] = {
        PLANS[0]: compiled(GIB, fingerprint="a", step_s=1.0),
        PLANS[1]: compiled(GIB, fingerprint="b", step_s=1.01),
        PLANS[2]: compiled(GIB, fingerprint="c", step_s=0.5),
    }
    assert pairs_in_order(estimates, done) == (0, 2)


def test_a_compile_that_fails_leaves_its_twin_open() -> None:
    one, twin = PLANS[:2]
    screened: dict[Plan, Outcome] = dict.fromkeys((one, twin), compiled(GIB, fingerprint="same"))
    late = TimedOut(stage="compile", limit_s=300.0)
    assert twin in known_of({}, screened, {one: late}).left()
    assert twin not in known_of({}, screened, {one: compiled(GIB, fingerprint="same")}).left()
    # What fails while it runs is the program.
    ran = replace(known_of({}, screened, {one: late}), is_replayed=False)
    assert twin not in ran.left()


def test_low_effort_predicts_no_time() -> None:
    blind = PLANS[2]
    estimates = {plan: estimated(1.0) for plan in PLANS[:2]}
    state = known_of(estimates, {blind: compiled(GIB)}, {})
    assert set(state.view().rows) == set(estimates)
    assert blind in replace(state, is_replayed=False).view().rows


def test_a_twin_without_an_estimate_hides_no_replay() -> None:
    estimates = {PLANS[1]: estimated(1.0), PLANS[2]: estimated(2.0)}
    same = compiled(GIB, fingerprint="same", step_s=1.0)
    done: dict[Plan, Outcome] = {
        PLANS[0]: same,
        PLANS[1]: same,
        PLANS[2]: compiled(GIB, fingerprint="other", step_s=2.0),
    }
    assert pairs_in_order(estimates, done) == (1, 1)
    assert known_of(estimates, {}, done, PLANS[:3]).view().refinement is not None
