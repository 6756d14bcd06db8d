"""The figures that the benchmarks of estimates against replays print, and words for rings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.cost.terms import CollectiveTerm, Kernel, Monomial, Sum, Terms, Windowed
from automesh.cost.windowed import THRESHOLDS
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Estimated, ReplayOutcome
from automesh.report.explain.nouns import Explained
from automesh.report.explain.words import window_sentence
from benchmarks import tpu_rank, windowed
from benchmarks.support.compiles import Played
from tests.support.samples import explain_samples

OPTION = THRESHOLDS["tpu"]


def plan(mesh: str, option: int | None = None) -> Plan:
    options = () if option is None else ((OPTION, option),)
    return Plan(axes=parse_mesh(mesh, ("dp", "fsdp", "tp")), compiler_options=options)


def played(one: Plan, estimate_s: float, replay_s: float) -> Played:
    estimated = Estimated(
        step_s=estimate_s,
        bracket_s=(estimate_s, estimate_s),
        bound_s=0.0,
        memory_bytes=1,
        causes=(("compute", estimate_s),),
    )
    replay = ReplayOutcome(
        step_s=replay_s,
        bracket_s=(replay_s, replay_s),
        causes=(("compute", replay_s),),
        communication_s=(),
        busy_s=(),
        mfu=0.5,
    )
    return Played(plan=one, estimated=estimated, replay=replay)


def test_rank_figures_by_hand() -> None:
    # The estimate swaps the first two, which are 10 % apart; the last two are a tie.
    rows = [
        played(plan("dp:16"), 2.0, 1.0),
        played(plan("fsdp:16"), 1.9, 1.1),
        played(plan("tp:16"), 5.0, 2.0),
        played(plan("dp:4,tp:4"), 4.0, 2.05),
        replace(played(plan("dp:2,tp:8"), 1.0, 1.0), replay=None, failure="needs more"),
    ]
    found = tpu_rank.figures(rows)
    assert found["plans"] == 4 and found["without_time"] == 1
    assert found["pairs_apart"] == 5
    assert found["pairs_ordered"] == pytest.approx(0.8)
    assert found["kendall_tau"] == pytest.approx((4 - 2) / 6, abs=1e-4)
    assert found["top1_regret"] == pytest.approx(0.1)
    assert found["top3_regret"] == 0.0


def test_an_option_that_changes_the_best_plan() -> None:
    rows = [
        played(plan("dp:2,fsdp:8"), 1.0, 1.0),
        played(plan("fsdp:16"), 1.5, 1.25),
        played(plan("fsdp:16", 1_000_000), 0.9, 0.8),
    ]
    found = windowed.figures(rows)
    assert found["changes_best"] and found["gain"] == pytest.approx(0.2)
    assert found["best_at_default"] == "dp:2,fsdp:8"
    assert found["largest_change"] == pytest.approx(0.8 / 1.25 - 1)
    unchanged = windowed.figures(rows[:2])
    assert not unchanged["changes_best"] and unchanged["gain"] == 0.0


def test_only_plans_that_the_option_changes_are_compiled_again() -> None:
    one = played(plan("fsdp:16"), 1.0, 1.0).estimated
    estimates = {
        plan("fsdp:16"): one,
        plan("fsdp:16", 1): replace(one, step_s=0.5),
        plan("dp:16"): one,
        plan("dp:16", 1): one,
    }
    kept = windowed.worth_compiling(estimates)
    assert kept == [plan("fsdp:16", 1), plan("fsdp:16"), plan("dp:16")]


def ringed(threshold: int | None) -> Explained:
    def total(value: float) -> Sum:
        return (Monomial(coefficient=value),)

    step: Terms = replace(
        explain_samples.terms("fsdp"),
        platform="tpu",
        kernels=(
            Kernel(
                region=1,
                count=total(4.0),
                bytes=total(1e9),
                windowed=(Windowed(axes=("fsdp",), bytes=total(1e9), whole_bytes=total(1e8)),),
                operation="dot_general",
                source="train.py:31",
            ),
        ),
        collectives=(
            CollectiveTerm(
                region=1,
                count=total(4.0),
                kind="all-gather",
                axes=("fsdp",),
                payload_bytes=total(1e8),
                hides=True,
                windowed=True,
                whole_bytes=total(1e8),
                source="train.py:31",
            ),
        ),
        window_threshold_bytes=float(threshold or 0) * 2**20,
    )
    one = explain_samples.explained("fsdp:8", step)
    return replace(one, plan=plan("fsdp:8", threshold))


def test_words_name_the_rings_and_their_absence() -> None:
    rings, none = ringed(None), ringed(1_000_000)
    said = window_sentence(explain_samples.explanation(rings, none))
    assert "fsdp:8: windowed einsums: 4 collectives over fsdp become rings" in said
    assert f"no windowed einsum under `{OPTION}=1000000`" in said
    alone = window_sentence(explain_samples.explanation(rings))
    assert alone.startswith("windowed einsums: 4 collectives over fsdp")
    plain = explain_samples.explained("fsdp:8", explain_samples.terms("fsdp"))
    assert window_sentence(explain_samples.explanation(plain)) == ""
