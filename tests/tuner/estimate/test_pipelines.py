"""The estimate rung with pipelines: what is propagated for them, and what shares it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automesh.cost.pipeline.terms import PipelineTerms, ScheduleText
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Failed
from automesh.pipeline.actions import ActionKind
from automesh.program.nouns import Propagation
from automesh.tuner.estimate.propagations import groups_of
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import PropagateJob
from tests.support.fakes.estimate_pool import PIPELINE_AXES, FakePool, propagation, rung, terms
from tests.support.samples.cost_samples import stage

HALVES = ("zb_h1", "zb_h2")


def plan(mesh: str, **knobs: bool | int | float | str) -> Plan:
    return Plan(axes=parse_mesh(mesh, PIPELINE_AXES), knobs=tuple(knobs.items()))


def answer(job: PropagateJob) -> Propagation:
    """A pipeline where there are ranks; `schedule` is what the knob says."""
    made = propagation(job)
    ranks = dict(job.sizes).get("pp", 1)
    if ranks == 1:
        return made
    knobs = dict(job.knobs)
    name = str(knobs.get("schedule", "1f1b"))
    kinds: tuple[ActionKind, ...] = ("F", "I", "W", "B") if name in HALVES else ("F", "B")
    text = ScheduleText(
        name=name,
        num_ranks=ranks,
        num_microbatches=int(knobs.get("microbatches", 4)),
        num_stages=ranks,
    )
    pipeline = PipelineTerms(
        axis="pp", schedule=text, kinds=(stage(terms(job), kinds),), stages=(0,) * ranks
    )
    return replace(made, pipeline=pipeline)


def test_every_number_of_ranks_is_a_propagation_of_its_own() -> None:
    plans = [plan(f"pp:{ranks},dp:{16 // ranks}") for ranks in (1, 2, 4, 8)]
    (group,) = groups_of(plans)
    assert [need.active for need in group.needs] == [("dp",)]
    assert sorted(dict(need.sizes)["pp"] for need in group.pipelined) == [2, 4, 8]
    pool = FakePool(answers=answer)
    found = rung(plans, pool).run()
    assert set(found.found) == set(plans)
    assert found.propagations == len(pool.propagated) == 4
    assert dict(found.found[plans[1]].causes).keys() == {"bubble"}


def test_schedules_of_the_same_programs_share_them() -> None:
    names = ("1f1b", "gpipe", "zb_h1", "zb_h2", "eager_1f1b")
    plans = [plan("pp:2,dp:4", schedule=name, microbatches=8) for name in names]
    pool = FakePool(answers=answer)
    found = rung(plans, pool).run()
    assert {dict(job.knobs)["schedule"] for job in pool.propagated} == {"1f1b", "zb_h1"}
    # Each is priced as its own schedule.
    for one, name in zip(plans, names, strict=True):
        assert found.found[one].step_s == 8 + len(name) / 100


def test_what_is_shared_is_kept_for_each_schedule(tmp_path: Path) -> None:
    plans = [plan("pp:2,dp:4", schedule=name) for name in ("1f1b", "gpipe")]
    cache = TermsCache(folder=tmp_path, source_hash="x", versions=())
    rung(plans, FakePool(answers=answer), cache=cache).run()
    kept = {dict(one.job.knobs)["schedule"]: one.propagation.pipeline for one in cache.all()}
    assert {name: one and one.schedule.name for name, one in kept.items()} == {
        "1f1b": "1f1b",
        "gpipe": "gpipe",
    }


def test_a_step_that_does_not_follow_the_knob_shares_nothing() -> None:
    plans = [plan("pp:2,dp:4", schedule=name) for name in ("gpipe", "1f1b")]

    def always(job: PropagateJob) -> Propagation:
        return answer(replace(job, knobs=(("schedule", "eager_1f1b"),)))

    pool = FakePool(answers=always)
    found = rung(plans, pool).run()
    assert len(pool.propagated) == 2
    assert {one.step_s for one in found.found.values()} == {4 + len("eager_1f1b") / 100}


def test_an_axis_of_that_name_without_a_pipeline_is_an_axis() -> None:
    plans = [plan("pp:2,dp:4"), plan("pp:4,dp:2")]
    found = rung(plans, FakePool(answers=propagation)).run()
    assert set(found.found) == set(plans)
    assert {one.causes[0][0] for one in found.found.values()} == {"compute"}


def test_a_refusal_is_told_for_each_schedule() -> None:
    plans = [plan("pp:2,dp:4", schedule=name) for name in ("gpipe", "1f1b")]

    def refused(job: PropagateJob) -> Failed:
        return Failed(stage="build", reason="9 layers cannot be divided evenly")

    found = rung(plans, FakePool(answers=refused)).run()
    assert not found.found
    assert all("9 layers" in found.missing[one] for one in plans)
