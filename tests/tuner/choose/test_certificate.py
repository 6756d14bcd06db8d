"""What is compiled and raced by estimate, and the two sentences at the end, which never mix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.correction import Refinement
from automesh.hardware import chip_for
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled, Counts, Estimated, Failed, Measured, Memory, Outcome
from automesh.tuner.choose.certificate import (
    MARGIN,
    belief,
    best_upper_s,
    certificate,
    chances_of,
    excluded_by_bound,
)
from automesh.tuner.choose.finalists import challengers, finalists, raceable, to_compile
from automesh.tuner.choose.state import SearchState

MEMORY = Memory(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=1, peak_bytes=3)
CPU = chip_for("cpu", "cpu")
MESHES = ["dp:16", "tp:16", "dp:2,tp:8", "dp:4,tp:4", "dp:8,tp:2", "sp:16", "dp:2,sp:8"]
AXES = ("dp", "tp", "sp")


def plan(mesh: str, remat: str = "none") -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), knobs=(("remat", remat),))


def estimated(step_s: float, *, bound_s: float = 0.0, memory_bytes: int = 10) -> Estimated:
    return Estimated(
        step_s=step_s,
        bracket_s=(step_s, step_s),
        bound_s=bound_s,
        memory_bytes=memory_bytes,
        causes=(("compute", step_s),),
    )


def compiled(fingerprint: str, step_s: float = 1.0) -> Compiled:
    return Compiled(
        fingerprint=fingerprint,
        memory=MEMORY,
        counts=Counts(flops=10, hbm_bytes=10, collectives=()),
        step_s=step_s,
        compile_s=1.0,
    )


def measured(step_s: float, **changes: object) -> Measured:
    outcome = Measured(
        step_s=step_s,
        interval_s=(0.98 * step_s, 1.02 * step_s),
        rounds_s=(step_s,) * 4,
        losses=(1.0,),
        numerics="agree",
        numerics_detail="",
        values="synthetic",
        raced_out=False,
        confirmed=False,
        peak_bytes=0,
    )
    return replace(outcome, **changes)


def contest(
    estimates: dict[Plan, Estimated],
    *,
    plans: list[Plan] | None = None,
    baseline: tuple[Plan, ...] = (),
    top: int = 2,
    memory_bytes: int = 0,
) -> SearchState:
    plans = list(estimates) if plans is None else plans
    return SearchState(
        plans=plans,
        estimates=estimates,
        programs={},
        results={},
        baseline=baseline,
        usual=plans[0],
        chip=CPU,
        top=top,
        device_memory_bytes=memory_bytes,
    )


ESTIMATES = {plan(mesh): estimated(1.0 + 0.1 * n) for n, mesh in enumerate(MESHES)}


class TestWhatIsCompiled:
    def test_the_best_by_estimate_and_the_baseline(self) -> None:
        asked = contest(ESTIMATES, baseline=(plan("sp:16"),))
        assert to_compile(asked, wanted=2) == (
            plan("sp:16"),
            plan("dp:16"),
            plan("tp:16"),
        )

    def test_those_without_an_estimate_come_last_and_all(self) -> None:
        some = {one: ESTIMATES[one] for one in list(ESTIMATES)[3:]}
        asked = contest(some, plans=list(ESTIMATES))
        chosen = to_compile(asked, wanted=2)
        assert chosen[:2] == (plan("dp:4,tp:4"), plan("dp:8,tp:2"))
        assert set(chosen[2:]) == set(ESTIMATES) - set(some)

    def test_what_hardly_fits_comes_after_what_is_slower(self) -> None:
        large = ESTIMATES | {plan("dp:16"): estimated(0.1, memory_bytes=160)}
        assert to_compile(contest(large, memory_bytes=100), wanted=7)[-1] == plan("dp:16")
        # Inside the margin the estimate of memory decides nothing.
        near = ESTIMATES | {plan("dp:16"): estimated(0.1, memory_bytes=149)}
        assert to_compile(contest(near, memory_bytes=100), wanted=7)[0] == plan("dp:16")

    def test_what_the_bound_excludes_is_never_compiled(self) -> None:
        bounded = ESTIMATES | {plan("tp:16"): estimated(1.1, bound_s=1.05)}
        asked = contest(bounded)
        assert plan("tp:16") in to_compile(asked, wanted=7)
        known = {plan("dp:16"): measured(1.0)}
        assert plan("tp:16") not in to_compile(asked.knowing({}, known), wanted=7)
        assert plan("tp:16") not in challengers(asked.knowing({}, known))

    def test_too_many_without_an_estimate_are_left_to_a_sampler(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("automesh.tuner.choose.finalists.LIMIT", 3)
        some = {one: ESTIMATES[one] for one in list(ESTIMATES)[:3]}
        others = [plan(mesh, remat) for mesh in MESHES for remat in ("none", "full")]
        asked = contest(some, plans=others)
        chosen = to_compile(asked, wanted=3)
        assert set(some) <= set(chosen)
        assert len(chosen) == len(set(chosen)) == 6


class TestWhoIsRaced:
    def test_finalists_by_refined_estimate_one_per_program(self) -> None:
        known: dict[Plan, Outcome] = {one: compiled(str(one)) for one in ESTIMATES}
        known[plan("tp:16")] = compiled(str(plan("dp:16")))
        known[plan("dp:2,tp:8")] = Failed(stage="compile", reason="no")
        assert finalists(contest(ESTIMATES).knowing(known, {})) == (
            plan("dp:16"),
            plan("dp:4,tp:4"),
        )

    def test_the_same_program_need_not_be_measured_twice(self) -> None:
        known: dict[Plan, Outcome] = {
            plan("dp:16"): compiled("a"),
            plan("tp:16"): compiled("a"),
            plan("sp:16"): Failed(stage="compile", reason="no"),
        }
        left = contest(ESTIMATES).knowing(known, {plan("dp:16"): measured(1.0)}).left()
        assert set(left) == set(ESTIMATES) - set(known)

    def test_until_the_model_knows_its_error_all_are_challengers(self) -> None:
        assert len(challengers(contest(ESTIMATES).knowing({}, {plan("dp:16"): measured(1.0)}))) == 6

    def test_those_that_the_model_finds_slower_are_not(self) -> None:
        wide = {plan(mesh): estimated(1.0 + n) for n, mesh in enumerate(MESHES)}
        known: dict[Plan, Outcome] = {one: measured(3 * wide[one].step_s) for one in list(wide)[:5]}
        asked = contest(wide).knowing({}, known)
        assert challengers(asked) == ()
        said = asked.belief(3.0)
        assert said.startswith("none of the 2 plans not measured is believed to be more than")
        assert "leave-one-out error" in said and "over 5 measured plans" in said

    def test_one_that_should_be_faster_is(self) -> None:
        wide = {plan(mesh): estimated(1.0 + n) for n, mesh in enumerate(MESHES)}
        known: dict[Plan, Outcome] = {
            one: measured(3 * wide[one].step_s) for one in list(wide)[1:6]
        }
        asked = contest(wide).knowing({}, known)
        assert challengers(asked) == (plan("dp:16"),)
        assert "1 plan not measured may be more than 2.0 % faster than the best" in asked.belief(
            6.0
        )
        assert "most likely dp:16 remat=none" in asked.belief(6.0)

    def test_raceable_is_what_compiled_to_a_new_program(self) -> None:
        known: dict[Plan, Outcome] = {
            plan("dp:16"): compiled("a"),
            plan("tp:16"): compiled("a"),
            plan("dp:4,tp:4"): compiled("b"),
            plan("dp:8,tp:2"): compiled("b"),
        }
        asked = contest(ESTIMATES)
        state = asked.knowing(known, {plan("dp:16"): measured(1.0)})
        chosen = raceable(state, list(ESTIMATES))
        assert len(chosen) == 1 and known[chosen[0]] == compiled("b")


class TestCertificate:
    def test_a_bound_close_to_the_best(self) -> None:
        bounded = {one: estimated(2.0, bound_s=0.97) for one in ESTIMATES}
        assert certificate(list(bounded), bounded, 1.0) == (
            "no plan among the 7 not measured can beat the best by more than 3.0 %: sound bound"
        )
        assert certificate([plan("dp:16")], bounded, 1.0) == (
            "the plan not measured cannot beat the best by more than 3.0 %: sound bound"
        )

    def test_a_bound_beyond_the_best(self) -> None:
        bounded = {one: estimated(2.0, bound_s=1.5) for one in ESTIMATES}
        assert certificate(list(bounded), bounded, 1.0) == (
            "no plan among the 7 not measured can beat the best: sound bound"
        )

    def test_a_loose_bound_is_called_one(self) -> None:
        bounded = {one: estimated(2.0, bound_s=0.1) for one in ESTIMATES}
        assert "too loose for a certificate" in certificate(list(bounded), bounded, 1.0)

    def test_nothing_sound_is_no_certificate(self) -> None:
        said = certificate(list(ESTIMATES), ESTIMATES, 1.0)
        assert said.endswith("nothing sound is known of any of them: no certificate")
        partly = ESTIMATES | {plan("dp:16"): estimated(1.0, bound_s=0.9)}
        assert "nothing sound is known of 6 of them" in certificate(list(partly), partly, 1.0)

    def test_nothing_left_and_nothing_measured(self) -> None:
        assert "nothing is left" in certificate([], ESTIMATES, 1.0)
        assert "nothing was measured" in certificate(list(ESTIMATES), ESTIMATES, None)

    @settings(max_examples=200)
    @given(bound=st.floats(0.5, 1.2), best=st.floats(0.001, 100.0))
    def test_it_never_promises_more_than_the_bound(self, bound: float, best: float) -> None:
        bounded = {plan("dp:16"): estimated(2.0 * best, bound_s=bound * best)}
        said = certificate(list(bounded), bounded, best)
        if "by more than" in said:
            share = float(said.split("by more than ")[1].split(" %")[0]) / 100
            assert best * (1 - share) <= bounded[plan("dp:16")].bound_s * (1 + 1e-9)


class TestBelief:
    def test_without_a_view(self) -> None:
        assert "too few" in belief(3, None, ())
        assert belief(0, None, ()) == ""

    def test_plans_without_an_estimate_are_counted(self) -> None:
        view = (
            contest(ESTIMATES)
            .knowing({}, {one: measured(3 * ESTIMATES[one].step_s) for one in list(ESTIMATES)[:4]})
            .view()
        )
        assert isinstance(view.refinement, Refinement)
        left = list(ESTIMATES)[4:]
        chances = chances_of(left, view.rows, view.refinement, 3.0)
        said = belief(5, view.refinement, chances)
        assert "no view of 2 without an estimate" in said
        assert "no view of the 5" in belief(5, view.refinement, ())

    def test_chances_are_for_more_than_the_margin(self) -> None:
        view = contest(ESTIMATES).knowing({}, {plan("dp:16"): measured(1.0)}).view()
        assert view.refinement is not None
        (one, *_) = chances_of([plan("tp:16")], view.rows, view.refinement, 1.0)
        direct = view.refinement.chance_below(1.0 - MARGIN)[view.rows[plan("tp:16")]]
        assert one.chance == pytest.approx(direct)


@settings(max_examples=200)
@given(
    times=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=7, unique=True),
    slack=st.lists(st.floats(0.0, 1.0), min_size=7, max_size=7),
)
def test_a_true_bound_never_excludes_the_fastest(times: list[float], slack: list[float]) -> None:
    plans = [plan(mesh) for mesh in MESHES[: len(times)]]
    bounded = {
        one: estimated(time, bound_s=time * part)
        for one, time, part in zip(plans, times, slack, strict=False)
    }
    fastest = plans[times.index(min(times))]
    for others in range(1, len(plans)):
        known = {one: measured(time) for one, time in list(zip(plans, times))[:others]}
        excluded = excluded_by_bound(bounded, known)
        assert fastest not in excluded
        assert not excluded & known.keys()


def test_what_may_not_be_exported_is_no_yardstick() -> None:
    wrong = {plan("dp:16"): measured(1e-6, numerics="differ")}
    assert best_upper_s(wrong) is None
    assert excluded_by_bound({plan("tp:16"): estimated(1.0, bound_s=1.0)}, wrong) == frozenset()
    assert math.isclose(best_upper_s({plan("dp:16"): measured(1.0)}) or 0.0, 1.02)


def test_plans_that_ran_once_decide_nothing() -> None:
    """Before, they were among those that "are not measured", though the table shows their times."""
    assert certificate([], {}, 1.0, once=7) == (
        "7 plans ran only once, which decides nothing: no certificate"
    )
    assert certificate([plan("dp:16")], {}, 1.0, once=1) == (
        "1 plan ran only once, which decides nothing, and 1 plan is not measured: no certificate"
    )
