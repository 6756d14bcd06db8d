"""The estimate rung: what is propagated, in which order, and what plans without terms become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.terms import DivisibilityGuard
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, TimedOut
from automesh.program.nouns import Propagation
from automesh.report.estimates import NO_TIME
from automesh.report.progress import Silent
from automesh.space.enumerate import factorizations
from automesh.tuner.estimate.propagations import groups_of
from automesh.tuner.estimate.propagator import NeedQueue
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import PropagateJob
from automesh.worker.pool import Finished
from tests.support.fakes.estimate_pool import AXES, GUARD, FakePool, plan, propagation, rung


def all_plans(devices: int, **knobs: bool | int | float | str) -> list[Plan]:
    meshes = [
        ",".join(f"{axis}:{size}" for axis, size in zip(AXES, sizes))
        for sizes in factorizations(devices, len(AXES)).tolist()
    ]
    return [plan(mesh, **knobs) for mesh in meshes]


def test_one_propagation_per_set_of_active_axes() -> None:
    pool = FakePool()
    plans = all_plans(16)
    found = rung(plans, pool).run()
    assert set(found.found) == set(plans)
    assert not found.missing
    actives = [tuple(axis for axis, _ in job.sizes) for job in pool.propagated]
    assert len(actives) == len(set(actives)) == found.propagations == 7
    assert found.origin == "the test"


def test_where_nothing_is_to_be_propagated_no_progress_is_shown() -> None:
    class Seen(Silent):
        phases = 0

        def phase(self, *_: object, **__: object) -> None:
            self.phases += 1

    seen = Seen()
    propagator = rung(all_plans(2), FakePool()).propagator
    propagator.progress = seen
    assert propagator.answer([]) == {}
    assert seen.phases == 0


def test_compiler_options_need_no_propagation_of_their_own() -> None:
    pool = FakePool()
    option = Plan(axes=plan("dp:4").axes, compiler_options=(("xla_x", 1),))
    found = rung([plan("dp:4"), option], pool).run()
    assert len(pool.propagated) == 1
    assert found.found[plan("dp:4")] == found.found[option]


@settings(max_examples=40, deadline=None)
@given(devices=st.integers(1, 64))
def test_sizes_are_small_and_probes_occur(devices: int) -> None:
    plans = all_plans(devices)
    (group,) = groups_of(plans)
    members = sorted(member for need in group.needs for member in need.members)
    assert members == list(range(len(plans)))
    for need in group.needs:
        mine = [plans[member].sizes for member in need.members]
        for axis, size in need.sizes:
            assert size == min(sizes[axis] for sizes in mine) > 1
        assert np.prod([size for _, size in need.sizes]) <= devices
        for probe in (*need.probes, need.spare):
            assert dict(probe) in [{axis: s[axis] for axis in need.active} for s in mine]
        assert need.sizes not in need.probes
        if len({tuple(sizes.items()) for sizes in mine}) > 1:
            assert need.probes


def test_the_default_knobs_come_first_and_then_one_choice_after_the_other() -> None:
    pool = FakePool()
    plans = [*all_plans(8, remat="none"), *all_plans(8, remat="full"), *all_plans(8, remat="dots")]
    rung(plans, pool, workers=1).run()
    order = [dict(job.knobs)["remat"] for job in pool.propagated]
    assert order == ["none"] * 7 + ["full"] * 7 + ["dots"] * 7
    # With other knobs all axes come first, then the sets that did best: here those without tp.
    first, *others = ([axis for axis, _ in job.sizes] for job in pool.propagated[7:14])
    assert first == ["dp", "tp", "sp"]
    assert not any("tp" in one for one in others[:3])


def test_workers_share_the_default_knobs_and_then_take_one_choice_each() -> None:
    first = groups_of([plan("dp:4", k=1), plan("tp:4", k=1), plan("dp:4", k=2), plan("tp:4", k=2)])
    needs = [need for group in first for need in group.needs]
    lanes = NeedQueue(needs)
    one = lanes.next([])
    assert one is not None
    other = lanes.next([one.call])
    assert other is not None and other.call != one.call
    after = lanes.after(one)
    assert after is not None and after.call == one.call
    assert lanes.after(one) is None
    assert lanes.next([one.call]) is not None
    assert lanes.next([]) is None


@pytest.mark.parametrize(("each_s", "pulses"), [(0.1, (2, 3)), (1.0, (8, 8))])
def test_the_lease_is_renewed_twice_a_second_however_many_answers_come(
    each_s: float, pulses: tuple[int, int]
) -> None:
    class Steady(FakePool):
        def wait(self, timeout_s: float | None = None) -> list[Finished]:
            found = super().wait(timeout_s)
            self.now_s += each_s - 1.0
            return found

    heard: list[float] = []
    pool = Steady()
    estimating = rung(all_plans(8, k=1), pool)
    estimating.propagator.pulse = lambda: heard.append(pool.now_s)
    estimating.run()
    assert len(pool.propagated) == 7
    fewest, most = pulses
    assert fewest - 1 <= len(heard) <= most


def test_a_crash_ends_nothing_and_is_told() -> None:
    def answer(job):
        if ("tp", 2) in job.sizes:
            return Failed(stage="propagate", reason="the worker was killed by signal 11")
        return propagation(job)

    found = rung(all_plans(8), FakePool(answers=answer)).run()
    lost = {one for one in found.missing if one.sizes["tp"] > 1 and one.sizes["tp"] < 8}
    assert lost == set(found.missing)
    assert "signal 11" in next(iter(found.missing.values()))
    assert "not estimated" in found.missing_notice and "signal 11" in found.missing_notice


def test_a_step_that_refuses_small_sizes_is_asked_at_those_of_a_plan() -> None:
    asked: list[tuple[tuple[str, int], ...]] = []

    def answer(job):
        asked.append(job.sizes)
        if len(job.sizes) == 2 and dict(job.sizes).get("dp") == 2 == dict(job.sizes).get("tp"):
            return Failed(stage="build", reason="dp * tp must be 8")
        return propagation(job)

    plans = [plan("dp:2,tp:4"), plan("dp:4,tp:2")]
    found = rung(plans, FakePool(answers=answer)).run()
    assert asked == [(("dp", 2), ("tp", 2)), (("dp", 2), ("tp", 4))]
    assert set(found.found) == set(plans)


def test_other_sizes_of_a_refused_set_are_tried_by_themselves() -> None:
    """One size that a script refuses took all meshes with these axes out of the search."""

    def answer(job):
        if dict(job.sizes).get("tp") == 2:
            return Failed(stage="build", reason="two stages are not written")
        return propagation(job)

    plans = [plan(mesh) for mesh in ("dp:4,tp:2", "dp:2,tp:4", "tp:2,sp:4", "tp:4,sp:2", "dp:8")]
    pool = FakePool(answers=answer)
    found = rung(plans, pool).run()
    # Of dp and tp the second try is accepted, and prices both.
    assert {one.mesh for one in found.missing} == {"tp:2,sp:4"}
    assert {one.mesh for one in found.found} == {"dp:4,tp:2", "dp:2,tp:4", "tp:4,sp:2", "dp:8"}
    tried = [job.sizes for job in pool.propagated]
    assert len(tried) == len(set(tried)), "no size is tried twice"


def test_a_timeout_and_a_failure_of_shardy_are_not_tried_again() -> None:
    for outcome in (TimedOut(stage="lower", limit_s=1.0), Failed(stage="propagate", reason="no")):
        pool = FakePool(answers=lambda job, outcome=outcome: outcome)
        found = rung([plan("dp:2,tp:4"), plan("dp:4,tp:2")], pool).run()
        assert len(pool.propagated) == 1
        assert len(found.missing) == 2


def test_a_worker_that_died_of_something_else_is_given_a_second_try() -> None:
    tries: list[int] = []

    def answer(job):
        tries.append(1)
        return Failed(stage="lower", reason="died") if len(tries) == 1 else propagation(job)

    found = rung([plan("dp:8")], FakePool(answers=answer, doubtful=True)).run()
    assert len(tries) == 2
    assert set(found.found) == {plan("dp:8")}


def uneven_at_8(job: PropagateJob) -> Propagation:
    """Terms as `propagate` makes them of a program with a dimension of 4 that tp splits."""
    is_even = 4 % dict(job.sizes).get("tp", 1) == 0
    return propagation(job, guards=(GUARD,)) if is_even else propagation(job, fixed=("tp",))


def test_meshes_beyond_the_guards_share_propagations_of_their_own() -> None:
    pool = FakePool(answers=uneven_at_8)
    plans = all_plans(128)
    found = rung(plans, pool).run()
    assert set(found.found) == set(plans)
    apart = [job for job in pool.propagated if job.exact]
    # Each size of tp that does not divide, once per set of axes that has meshes with it.
    wanted = {
        (tp, one.sizes["dp"] > 1, one.sizes["sp"] > 1)
        for one in plans
        if (tp := one.sizes["tp"]) > 4 and tp < 128
    }
    assert {
        (sizes["tp"], "dp" in sizes, "sp" in sizes) for job in apart if (sizes := dict(job.sizes))
    } == wanted
    assert len(apart) == len(wanted)
    assert any("because some array does not divide" in notice for notice in found.details)


def test_a_program_that_is_another_one_at_the_smallest_size_is_tried_at_the_next() -> None:
    def answer(job: PropagateJob) -> Propagation:
        sizes = dict(job.sizes)
        return propagation(job, fixed=("sp",)) if sizes.get("sp") == 2 else propagation(job)

    pool = FakePool(answers=answer)
    plans = all_plans(128)
    found = rung(plans, pool).run()
    assert set(found.found) == set(plans)
    again = [dict(job.sizes) for job in pool.propagated if dict(job.sizes).get("sp") == 4]
    # All meshes with sp:4 and above at once, for each set of axes; sp alone has only sp:128.
    assert sorted(map(tuple, again)) == [("dp", "sp"), ("dp", "tp", "sp"), ("tp", "sp")]


def test_terms_that_never_hold_end_in_a_propagation_for_each_mesh() -> None:
    pool = FakePool(
        answers=lambda job: propagation(
            job, guards=(GUARD, DivisibilityGuard(size=1, axes=("sp",)))
        )
    )
    plans = all_plans(32)
    found = rung(plans, pool).run()
    assert set(found.found) == set(plans)
    assert len(pool.propagated) <= 2 * len(plans)


def test_an_axis_whose_size_is_in_the_shapes_is_named() -> None:
    def answer(job):
        fixed = tuple(axis for axis, _ in job.sizes if axis == "sp")
        return propagation(job, fixed=fixed)

    found = rung(all_plans(8), FakePool(answers=answer)).run()
    assert not found.missing
    assert any("the step has the size of `sp` in its shapes" in one for one in found.details)


def test_without_time_plans_have_no_estimate_and_say_why() -> None:
    pool = FakePool()
    plans = [*all_plans(8, remat="none"), *all_plans(8, remat="full")]
    found = rung(plans, pool, deadline_s=8.0, workers=1).run()
    assert {one for one in plans if dict(one.knobs)["remat"] == "none"} <= set(found.found)
    assert found.missing
    assert set(found.missing.values()) == {NO_TIME}
    assert set(found.found) | set(found.missing) == set(plans)


def test_terms_that_a_probe_contradicts_give_an_order_but_no_bound() -> None:
    def answer(job):
        made = propagation(job)
        return (
            made
            if not job.probes
            else type(made)(
                terms=made.terms,
                failed_probes=job.probes,
                notes=(),
                lower_s=0.0,
                propagate_s=0.0,
            )
        )

    plans = [plan("dp:2,tp:8"), plan("dp:4,tp:4"), plan("dp:8,tp:2")]
    pool = FakePool(answers=answer)
    found = rung(plans, pool, deadline_s=2.0, workers=1).run()
    borrowed = [one for one in plans if not found.found[one].own_propagation]
    assert 0 < len(borrowed) < len(plans)
    assert all(found.found[one].bound_s == 0.0 for one in borrowed)
    assert all("of its own" in found.found[one].uncounted[-1] for one in borrowed)


def test_a_search_that_goes_on_propagates_nothing_again(tmp_path: Path) -> None:
    cache = TermsCache(folder=tmp_path / "terms", source_hash="a", versions=(("jax", "1"),))
    first, again, changed = FakePool(), FakePool(), FakePool()
    plans = all_plans(8)
    found = rung(plans, first, cache=cache).run()
    assert rung(plans, again, cache=cache).run() == found
    assert not again.jobs
    other = TermsCache(folder=tmp_path / "terms", source_hash="b", versions=(("jax", "1"),))
    rung(plans, changed, cache=other).run()
    assert len(changed.jobs) == len(first.jobs)


def test_a_broken_file_is_made_again(tmp_path: Path) -> None:
    cache = TermsCache(folder=tmp_path, source_hash="a", versions=())
    rung([plan("dp:8")], FakePool(), cache=cache).run()
    (path,) = tmp_path.iterdir()
    path.write_text("{half a fi")
    pool = FakePool()
    assert set(rung([plan("dp:8")], pool, cache=cache).run().found) == {plan("dp:8")}
    assert len(pool.jobs) == 1


def test_meshes_that_jax_cannot_lay_out_are_left_out() -> None:
    refused = Layouts(shapes=(), spans=(), refused=(((2, 4, 1), "no such assignment"),))
    pool = FakePool(layouts=refused)
    found = rung(all_plans(8), pool, torus=True).run()
    assert found.missing == {plan("dp:2,tp:4"): "no such assignment"}
    assert len(found.found) == len(all_plans(8)) - 1


def test_where_none_can_be_laid_out_the_reason_is_told() -> None:
    refused = Layouts(shapes=(), spans=(), refused=(((2, 4, 1), "no such assignment"),))
    found = rung([plan("dp:2,tp:4")], FakePool(layouts=refused), torus=True).run()
    assert not found.found and found.layouts == refused
    assert found.missing == {plan("dp:2,tp:4"): "no such assignment"}
    assert found.missing_notice == "1 plan not estimated, because: no such assignment"


def test_no_plans_no_work() -> None:
    pool = FakePool()
    assert not rung([], pool).run().found
    assert not pool.jobs


def test_jobs_that_are_dropped_at_the_deadline_lower_nothing_for_others() -> None:
    made = rung(all_plans(8), FakePool(), deadline_s=1.5)
    made.run()
    shared = made.propagator._shared  # pyright: ignore[reportPrivateUsage]
    assert shared.running and set(shared.running.values()) == {0}


def refused_at_8(job: PropagateJob) -> Propagation | Failed:
    """Terms of a program with a dimension of 4 that tp splits, which must be divided evenly."""
    if 4 % dict(job.sizes).get("tp", 1):
        return Failed(stage="lower", reason="4 is no multiple of 8")
    return propagation(job, guards=(GUARD,))


def test_what_divides_as_a_refused_mesh_does_is_refused_without_being_lowered() -> None:
    pool = FakePool(answers=refused_at_8)
    plans = all_plans(256)
    found = rung(plans, pool).run()
    # As without the conclusion: what tp divides unevenly has no estimate, all else has one.
    refused = {one for one in plans if one.sizes["tp"] > 4}
    assert set(found.missing) == refused
    assert set(found.found) == {*plans} - refused
    # Once beside dp and once beside sp. Of 16 and more, and of both, nothing is lowered; the mesh
    # of tp alone has no terms that could say why, and is asked for itself.
    apart = [job for job in pool.propagated if dict(job.sizes).get("tp", 1) > 4]
    assert {tuple(axis for axis, _ in job.sizes) for job in apart if job.exact} == {
        ("dp", "tp"), ("tp", "sp"),
    }  # fmt: skip
    assert {dict(job.sizes)["tp"] for job in apart} == {8, 256}
    told = [why for why in found.missing.values() if "not tried here" in why]
    assert len(told) > 10
    assert all("`tp` is a multiple of 8, too" in why for why in told)
    assert all(why.startswith("the step refuses it: ") for why in found.missing.values())
    assert found.refusals == len(refused)


def test_a_refusal_that_another_size_may_explain_says_nothing_about_others() -> None:
    def answer(job: PropagateJob) -> Propagation | Failed:
        sizes = dict(job.sizes)
        if sizes.get("tp", 1) > 4 and sizes.get("dp", 1) > 1:
            return Failed(stage="lower", reason="no")
        # The terms hold for this size of dp alone, and where tp divides 4.
        return propagation(job, guards=(GUARD,), fixed=("dp",) if "dp" in sizes else ())

    pool = FakePool(answers=answer)
    plans = all_plans(64)
    found = rung(plans, pool).run()
    # Seen with dp, it says nothing about meshes without.
    assert set(found.missing) == {
        one for one in plans if one.sizes["tp"] > 4 and one.sizes["dp"] > 1
    }
