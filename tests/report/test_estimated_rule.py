"""The rule of a dry run: it says that it is estimated, and passes over what is too large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.errors import NoFeasibleMesh
from automesh.mesh.rules.file import format_rules, parse_rules, rules_of
from automesh.outcomes import Estimated
from automesh.report.files.rule import estimated_rule_of, has_rule
from automesh.report.result import SearchResult
from tests.support.samples.results_samples import GIB, candidate, plan, predicted_search


def dry() -> SearchResult:
    """Three estimates, best first; the fastest needs most memory."""
    base = predicted_search()
    made = [
        candidate(
            plan(mesh, remat="full"),
            Estimated(
                step_s=step_s,
                bracket_s=(step_s, step_s),
                bound_s=0.0,
                memory_bytes=gib * GIB,
                causes=(("compute", step_s),),
            ),
            "not_measured",
        )
        for mesh, step_s, gib in (("dp:8", 1.0, 90), ("fsdp:8", 1.5, 20), ("dp:2,tp:4", 1.8, 10))
    ]
    return replace(base, candidates=tuple(made), is_ahead=False)


def test_the_fastest_that_is_estimated_to_fit_is_the_rule() -> None:
    rule = estimated_rule_of(dry(), within_bytes=50 * GIB)
    assert rule.axes[rule.hybrid_shape.ici_mesh_shape.index(8)] == "fsdp"
    evidence = rule.evidence
    assert (evidence.kind, evidence.step_s, evidence.hbm_bytes) == ("estimated", 1.5, 20 * GIB)
    assert evidence.runner_up.plan == "dp:2,tp:4 remat=full"
    assert evidence.runner_up.slower == pytest.approx(1.2)
    assert dict(evidence.tried)["estimated"] == 140
    assert not evidence.program.fingerprint
    assert ("libtpu", "0.0.42.1") in evidence.versions


def test_it_is_read_back_as_it_was() -> None:
    rule = estimated_rule_of(dry(), within_bytes=100 * GIB)
    rules = rules_of(rule)
    assert parse_rules(format_rules(rules), name="rules.toml") == rules


def test_nothing_that_fits_is_no_rule() -> None:
    with pytest.raises(NoFeasibleMesh, match=r"at most 5\.00 GiB"):
        estimated_rule_of(dry(), within_bytes=5 * GIB)


def test_a_dry_run_has_no_rule_of_its_own() -> None:
    assert not has_rule(dry())
