"""Findings in words: the fastest plan's first, each once."""

from __future__ import annotations

from automesh.cost.terms import Finding, Monomial, Terms
from automesh.mesh.axes import Plan, parse_mesh
from automesh.report.findings import RULES, FindingsOfPlans, sentence

PART = (Monomial(coefficient=8.0 * (1 << 20), powers=(("dp", -1),)),)


def terms(*findings: Finding) -> Terms:
    return Terms(
        active=("dp",),
        sampled=(("dp", 2),),
        platform="tpu",
        regions=(),
        kernels=(),
        collectives=(),
        points=(),
        argument_bytes=(),
        output_bytes=(),
        alias_bytes=(),
        findings=findings,
    )


def plan(mesh: str) -> Plan:
    return Plan(axes=parse_mesh(mesh, ("dp", "tp")))


# A compile, the time of others, or a part of the matrix unit.
COSTS_NO_BYTES = frozenset(("unrolled-layers", "uneven-work", "parts-below-tile"))


def test_every_rule_has_words_with_its_bytes_and_line() -> None:
    for rule in RULES:
        found = Finding(
            rule=rule, array="f32[8,8]", bytes=PART, axes=("dp",), source="a.py:3", detail="256"
        )
        text = sentence(found, {"dp": 4})
        assert "f32[8,8]" in text and text.endswith("(a.py:3)")
        assert "2.00 MiB" in text or rule in COSTS_NO_BYTES


def test_a_finding_is_said_once_with_the_fastest_plan_that_has_it() -> None:
    found = Finding(rule="lost-donation", array="args[1]", bytes=PART)
    seen = FindingsOfPlans()
    seen.add(plan("dp:2,tp:4"), 2.0, terms(found))
    seen.add(plan("dp:8"), 1.0, terms(found))
    seen.add(plan("tp:8"), 0.5, terms())
    (notice,) = seen.notices(3)
    assert "1.00 MiB" in notice and notice.endswith("[2 of 3 plans, here dp:8]")
