"""Who is compiled first, who is measured, and how what was tried is ordered."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from automesh.hardware import chip_for
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled, Counts, Failed, Measured, Memory
from automesh.report.comparison import Comparison
from automesh.tuner.choose.ranking import best_first, promising, rank

MEMORY = Memory(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=1, peak_bytes=3)
COUNTS = Counts(flops=10, hbm_bytes=10, collectives=())
CPU = chip_for("cpu", "cpu")


def plan(mesh: str, remat: str = "none") -> Plan:
    return Plan(axes=parse_mesh(mesh, ("dp", "tp")), knobs=(("remat", remat),))


def compiled(step_s: float, fingerprint: str = "") -> Compiled:
    return Compiled(
        fingerprint=fingerprint or str(step_s),
        memory=MEMORY,
        counts=COUNTS,
        step_s=step_s,
        compile_s=1.0,
    )


def measured(step_s: float, **changes: object) -> Measured:
    outcome = Measured(
        step_s=step_s,
        interval_s=(0.99 * step_s, 1.01 * step_s),
        rounds_s=(step_s,),
        losses=(1.0,),
        numerics="agree",
        numerics_detail="",
        values="synthetic",
        raced_out=False,
        confirmed=False,
        peak_bytes=0,
    )
    return replace(outcome, **changes)


def test_settings_of_good_meshes_are_compiled_before_those_of_bad_ones() -> None:
    plans = [plan(mesh, remat) for remat in ("none", "full") for mesh in ("dp:4", "tp:4")]
    known = {plan("dp:4"): compiled(2.0), plan("tp:4"): compiled(1.0)}
    assert best_first(plans, {}, usual=plans[0])[:2] == (plan("dp:4"), plan("tp:4"))
    order = best_first(plans[2:], known, usual=plans[0])
    assert order == (plan("tp:4", "full"), plan("dp:4", "full"))


def test_the_baseline_is_measured_whatever_its_rank_and_each_program_once() -> None:
    known = {
        plan("dp:4"): compiled(9.0),
        plan("tp:4"): compiled(1.0, "same"),
        plan("tp:4", "full"): replace(compiled(1.0, "same"), same_as="tp:4 remat=none"),
        plan("dp:2,tp:2"): compiled(2.0),
        plan("dp:2,tp:2", "full"): Failed(stage="compile", reason="no"),
    }
    chosen = promising(known, first=[plan("dp:4")], limit=2)
    assert chosen == (plan("dp:4"), plan("tp:4"), plan("dp:2,tp:2"))
    assert promising(known, first=[], limit=1) == (plan("tp:4"),)


def test_what_may_not_be_exported_is_never_the_best() -> None:
    outcomes = {
        plan("tp:4"): measured(1.0, numerics="differ", numerics_detail="loss is off"),
        plan("dp:4"): measured(3.0),
        plan("dp:2,tp:2"): measured(2.0, confirmed=True),
    }
    ranked = rank(
        compiled={},
        measured=outcomes,
        comparisons=[(plan("dp:4"), Comparison(verdict="slower", ratio=1.5, interval=(1.4, 1.6)))],
        baseline=[],
        chip=CPU,
        winner=[plan("dp:2,tp:2")],
    )
    assert [one.standing.verdict for one in ranked] == ["best", "slower", "excluded"]
    assert ranked[0].plan == plan("dp:2,tp:2")


def test_a_prediction_is_compared_with_that_of_the_exported_plan() -> None:
    """It was compared with the fastest prediction, whose plan had lost: "+50 %" for a plan that is
    predicted to take half of the winner's time."""
    known = {plan("dp:4"): compiled(2.0), plan("tp:4"): compiled(1.0), plan("dp:8"): compiled(4.0)}
    ranked = rank(
        compiled={**known, plan("dp:2,tp:2"): compiled(0.5)},
        measured={plan("dp:4"): measured(30.0, confirmed=True), plan("dp:2,tp:2"): measured(60.0)},
        comparisons=[],
        baseline=[],
        chip=CPU,
        winner=[plan("dp:4")],
    )
    found = {one.plan.mesh: one.standing for one in ranked}
    assert (found["tp:4"].ratio, found["tp:4"].step_s) == (0.5, 15.0)
    assert (found["dp:8"].ratio, found["dp:8"].step_s) == (2.0, 60.0)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=6, unique=True))
def test_every_plan_appears_once_and_predictions_are_in_order(times: list[float]) -> None:
    meshes = ["dp:4", "tp:4", "dp:2,tp:2", "dp:4,tp:2", "dp:2,tp:4", "dp:8"]
    known = {plan(mesh): compiled(time_s) for mesh, time_s in zip(meshes, times, strict=False)}
    ranked = rank(compiled=known, measured={}, comparisons=[], baseline=[], chip=CPU, winner=[])
    assert sorted(str(one.plan) for one in ranked) == sorted(map(str, known))
    steps = [one.outcome.step_s for one in ranked]
    assert steps == sorted(steps)


def test_the_baseline_is_compiled_before_all_else() -> None:
    plans = [plan("dp:4"), plan("tp:4"), plan("tp:4", "full")]
    order = best_first(plans, {}, usual=plans[0], first=[plan("tp:4", "full")])
    assert order == (plan("tp:4", "full"), plan("dp:4"), plan("tp:4"))
