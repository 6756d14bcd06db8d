"""The regret benchmark on made-up tables: what it should find, and that it counts right."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated
from benchmarks.regret.replay import SHARE, Purse, Record, figures, ordered, record_of, search
from benchmarks.regret.sweep import Row, Table
from tests.support.samples.results_samples import plan as any_plan

MESHES = ["dp:8", "fsdp:8", "dp:4,fsdp:2", "dp:2,fsdp:4", "dp:4,tp:2", "dp:2,tp:4", "fsdp:4,tp:2"]
MESHES += ["fsdp:2,tp:4", "dp:2,fsdp:2,tp:2", "dp:4,sp:2", "fsdp:4,sp:2", "tp:4,sp:2"]
PLANS = [
    any_plan(mesh, remat=remat, microbatches=parts)
    for remat in ("full", "none")
    for parts in (1, 2, 4, 8, 16)
    for mesh in MESHES
]


def true_s(plan: Plan) -> float:
    """Recomputing, microbatches and tp make it slower."""
    knobs = dict(plan.knobs)
    slower = (1.3 if knobs["remat"] == "full" else 1.0) * (
        1 + 0.1 * int(str(knobs["microbatches"]))
    )
    sizes = plan.sizes
    return 0.1 * slower * (1 + 0.2 * math.log2(sizes["tp"]) + 0.03 * math.log2(sizes["fsdp"]))


def rows(*, noise: float = 0.0, rounds: int = 3, drift: float = 0.0) -> list[Row]:
    luck = random.Random(0)
    return [
        Row(
            plan=str(plan),
            fingerprint=str(plan),
            rounds_s=tuple(
                true_s(plan) * math.exp(drift * number + noise * luck.gauss(0, 1))
                for number in range(rounds)
            ),
            visits_s=(1.0,) * rounds,
        )
        for plan in PLANS
    ]


def estimates(*, remat: float = 1.0) -> dict[Plan, Estimated]:
    """Right up to a common factor, but for what `remat` costs."""
    found: dict[Plan, Estimated] = {}
    for plan in PLANS:
        wrong = remat if dict(plan.knobs)["remat"] == "full" else 1.0
        seconds = 0.05 * true_s(plan) * wrong
        found[plan] = Estimated(
            step_s=seconds,
            bracket_s=(seconds, seconds),
            bound_s=0.0,
            memory_bytes=1,
            causes=(("compute", seconds / 2), ("latency", seconds / 2)),
        )
    return found


def test_right_estimates_find_the_best_at_once() -> None:
    record = record_of(rows(), PLANS)
    found = figures(record, estimates(), PLANS[0], seeds=5)
    assert (found["plans"], found["estimated"]) == (len(PLANS), len(PLANS))
    for key in ("top1_regret", "top5_regret", "search_regret"):
        assert found[key] == 0.0
    assert found["pairs_ordered"] == 1.0
    assert 0 < found["cost_ratio"] <= SHARE
    # The default remat and the largest fsdp are far from the best here.
    assert found["rule_regret"] == pytest.approx(1.3 * 1.09 - 1, abs=1e-3)
    assert 0 < found["tpe_regret"] <= found["random_regret"] + 0.2


def test_wrong_estimates_are_seen() -> None:
    record = record_of(rows(), PLANS)
    upside_down = {
        plan: Estimated(
            step_s=1 / true_s(plan),
            bracket_s=(0.0, 1.0),
            bound_s=0.0,
            memory_bytes=1,
            causes=(("compute", 1 / true_s(plan)),),
        )
        for plan in PLANS
    }
    found = figures(record, upside_down, PLANS[0], seeds=5)
    assert found["pairs_ordered"] == 0.0
    assert found["top1_regret"] > 1.0


def test_measuring_mends_estimates() -> None:
    record = record_of(rows(noise=0.01), PLANS)
    found = figures(record, estimates(remat=0.75), PLANS[0], seeds=5)
    assert found["refined_pairs_ordered"] > found["pairs_ordered"]
    assert found["search_regret"] == 0.0


def test_drift_of_the_machine_is_no_noise() -> None:
    still, drifting = record_of(rows(), PLANS), record_of(rows(drift=0.3), PLANS)
    assert still.noise == pytest.approx(0.0, abs=1e-9)
    assert drifting.noise == pytest.approx(0.0, abs=1e-9)
    best = min(PLANS, key=true_s)
    assert drifting.regret(best) == 0.0


def test_noise_is_what_equal_plans_differ_by() -> None:
    record = record_of(rows(noise=0.02, rounds=5), PLANS)
    # Medians of five: 1.96 * sqrt(2) * 1.2533 * 2 % / sqrt(5).
    assert record.noise == pytest.approx(0.031, rel=0.25)
    best = min(record.step_s, key=lambda plan: record.step_s[plan])
    close = Record(
        step_s={**record.step_s, PLANS[0]: record.best_s * (1 + 0.9 * record.noise)},
        cost_s=record.cost_s,
        program=record.program,
        noise=record.noise,
    )
    assert (close.regret(best), close.regret(PLANS[0])) == (0.0, 0.0)
    # Pairs inside the noise are not asked about.
    assert ordered(close, {best: 2.0, PLANS[0]: 1.0})[1] == 0


def test_equal_programs_are_paid_for_once() -> None:
    record = record_of(rows(), PLANS)
    shared = Record(
        step_s=record.step_s,
        cost_s=record.cost_s,
        program={plan: plan.mesh for plan in PLANS},
        noise=0.0,
    )
    assert shared.sweep_s == pytest.approx(3.0 * len(MESHES))
    purse = Purse(shared, 3.5)
    assert purse.measure(PLANS[0]) == pytest.approx(true_s(PLANS[0]))
    assert purse.measure(PLANS[len(MESHES)]) is not None  # the same program again
    assert purse.spent_s == pytest.approx(3.0)
    assert purse.measure(PLANS[1]) is None
    assert search(shared, estimates(), PLANS[0]).spent_s <= SHARE * shared.sweep_s + 3.0


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    table = Table.open(path, {"script": "a"})
    for row in rows():
        table.put(row)
    table.put(Row(plan="dp:8 remat=none", failure="Failed: it did not build"))
    table.save()
    again = Table.open(path, {"script": "a"})
    assert again.rows == table.rows
    assert len(again.measured()) == len(PLANS)
    assert Table.open(path, {"script": "b"}).rows == {}


def test_plans_of_one_program_share_what_was_measured(tmp_path: Path) -> None:
    table = Table.open(tmp_path / "record.json", {})
    table.put(Row(plan="dp:8", fingerprint="x", rounds_s=(1.0,), visits_s=(0.5,)))
    table.put(Row(plan="fsdp:8", fingerprint="x"))
    assert {row.plan: row.rounds_s for row in table.measured()} == {
        "dp:8": (1.0,),
        "fsdp:8": (1.0,),
    }
