"""The ranking while estimates are made: what it shows, when, and that it is the right one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed
from automesh.program.nouns import Propagation
from automesh.report.progress import Silent
from automesh.report.so_far import SoFar
from automesh.tuner.choose.ranking import estimated_candidates
from automesh.tuner.estimate.rung import EstimateRung
from automesh.tuner.estimate.standings import ROWS, Standings
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import PropagateJob
from tests.support.fakes.estimate_pool import FakePool, plan, propagation, rung
from tests.tuner.estimate.test_rung import all_plans, uneven_at_8


@dataclass
class Heard(Silent):
    said: list[SoFar] = field(default_factory=list)

    def ranking(self, so_far: SoFar) -> None:
        self.said.append(so_far)


def ranking(
    plans: list[Plan], pool: FakePool, *, baseline: tuple[Plan, ...] = (), **options: object
) -> tuple[EstimateRung, Heard]:
    """A rung that shows every table, however soon after the last one it comes."""
    made, heard = rung(plans, pool, **{"workers": 1, **options}), Heard()  # pyright: ignore
    ticks = iter(range(10**6))
    made.standings = Standings(progress=heard, baseline=baseline, clock=lambda: float(next(ticks)))
    made.first = baseline
    return made, heard


def test_there_is_a_table_after_each_set_of_axes() -> None:
    plans = all_plans(16)
    made, heard = ranking(plans, FakePool())
    found = made.run()
    assert len(heard.said) == found.propagations == 7
    estimated = [one.estimated for one in heard.said]
    assert estimated == sorted(set(estimated)) and estimated[-1] == len(plans)
    assert all(one.plans == len(plans) for one in heard.said)
    assert heard.said[-1].missing == ""


def test_each_table_is_what_the_whole_ranking_of_its_plans_begins_with() -> None:
    plans = [*all_plans(64, k=1), *all_plans(64, k=2)]
    pool = FakePool()
    made, heard = ranking(plans, pool)
    found = made.run()
    whole = estimated_candidates(found.found, baseline=(), device_memory_bytes=0)
    assert [one.plan for one in heard.said[-1].rows] == [one.plan for one in whole[:ROWS]]
    for number, so_far in enumerate(heard.said, start=1):
        done = {(job.knobs, frozenset(dict(job.sizes))) for job in pool.propagated[:number]}
        mine = {
            one: found.found[one]
            for one in plans
            if (one.knobs, frozenset(a for a, size in one.sizes.items() if size > 1)) in done
        }
        first = estimated_candidates(mine, baseline=(), device_memory_bytes=0)[:ROWS]
        assert [one.plan for one in so_far.rows] == [one.plan for one in first]
        assert so_far.estimated == len(mine)


def test_what_is_missing_is_named_while_it_is_missing() -> None:
    made, heard = ranking([plan("dp:8"), plan("dp:4,tp:2"), plan("tp:8")], FakePool())
    made.first = (plan("dp:8"),)
    made.run()
    assert [one.missing for one in heard.said] == ["meshes with tp", "1 plan, such as tp:8", ""]


@pytest.mark.parametrize("own", [plan("sp:8", remat="full"), plan("dp:8", remat="none")])
def test_the_scripts_own_mesh_comes_first_and_is_always_shown(own: Plan) -> None:
    plans = [*all_plans(8, remat="none"), *all_plans(8, remat="full"), *all_plans(8, remat="dots")]
    pool = FakePool()
    made, heard = ranking(plans, pool, baseline=(own,))
    found = made.run()
    assert found.found == rung(plans, FakePool()).run().found
    first = pool.propagated[0]
    (axis,) = (name for name, size in own.sizes.items() if size > 1)
    assert (first.knobs, first.sizes) == (own.knobs, ((axis, 8),))
    assert all(any(row.is_baseline and row.plan == own for row in one.rows) for one in heard.said)
    assert len(pool.propagated) == 21


def test_on_a_torus_the_table_waits_until_the_meshes_are_laid_out() -> None:
    made, heard = ranking(all_plans(8), FakePool(), torus=True)
    made.run()
    assert 6 <= len(heard.said) <= 8
    assert heard.said[-1].estimated == 10


def test_meshes_that_jax_cannot_lay_out_are_in_no_table() -> None:
    plans = all_plans(8)
    pool = FakePool(layouts=Layouts(shapes=(), spans=(), refused=(((8, 1, 1), "no such torus"),)))
    made, heard = ranking(plans, pool, torus=True)
    found = made.run()
    assert set(found.missing) == {plan("dp:8")}
    assert all(row.plan != plan("dp:8") for one in heard.said for row in one.rows)
    assert heard.said[-1].plans == heard.said[-1].estimated == 9


def test_what_was_propagated_before_is_ranked_before_anything_else() -> None:
    plans = all_plans(8)
    cache = TermsCache(folder=None, source_hash="", versions=())
    kept: dict[object, Propagation] = {}

    class Kept(TermsCache):
        def find(self, job: PropagateJob) -> Propagation | None:
            return kept.get(job)

    pool = FakePool()
    rung(plans, pool).run()
    kept |= {job: propagation(job) for job in pool.propagated[:3]}
    made, heard = ranking(
        plans,
        FakePool(),
        cache=Kept(
            **{name: getattr(cache, name) for name in ("folder", "source_hash", "versions")}
        ),
    )
    made.run()
    assert len(heard.said) == 7 and heard.said[2].estimated < heard.said[3].estimated


def test_plans_that_get_no_estimate_are_not_told_of_as_missing() -> None:
    def answer(job: PropagateJob) -> Propagation | Failed:
        if len(job.sizes) == 2:
            return Failed(stage="build", reason="no two axes")
        return propagation(job)

    made, heard = ranking(all_plans(8), FakePool(answers=answer))
    found = made.run()
    assert len(found.missing) == 6
    assert heard.said[-1].missing == "" and heard.said[-1].estimated == 4


def test_plans_with_a_program_of_their_own_are_told_of_until_they_have_it() -> None:
    plans = all_plans(128)
    made, heard = ranking(plans, FakePool(answers=uneven_at_8))
    made.run()
    assert any("with a program of their own" in one.missing for one in heard.said)
    assert heard.said[-1].missing == "" and heard.said[-1].estimated == len(plans)


def test_plans_that_hardly_fit_stand_behind_those_that_do() -> None:
    plans = all_plans(64)
    made, heard = ranking(plans, FakePool())
    assert made.standings is not None
    made.standings = replace(made.standings, device_memory_bytes=5000)
    found = made.run()
    whole = estimated_candidates(found.found, baseline=(), device_memory_bytes=5000)
    assert [one.plan for one in heard.said[-1].rows] == [one.plan for one in whole[:ROWS]]


def test_tables_come_seldom_enough_to_be_read() -> None:
    pool = FakePool()
    made, heard = ranking(all_plans(16), pool)
    assert made.standings is not None
    made.standings.clock = lambda: 0.1 * pool.now_s  # pyright: ignore
    made.run()
    assert 2 <= len(heard.said) <= 4
