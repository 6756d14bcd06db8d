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


def test_what_a_search_tries_anyway_is_no_notice() -> None:
    found = Finding(rule="replicated-state", array="args[1]", bytes=PART, axes=("tp",))
    seen = FindingsOfPlans(left_out=frozenset({"replicated-state"}))
    seen.add(plan("dp:2,tp:4"), 2.0, terms(found))
    assert seen.notices(1) == ()


def test_of_many_arrays_of_one_line_the_costliest_is_told() -> None:
    seen = FindingsOfPlans()
    for shape, many in (("f32[8]", 1.0), ("f32[16]", 4.0), ("f32[32]", 2.0)):
        found = Finding(
            rule="wide-reduction",
            array=shape,
            bytes=(Monomial(coefficient=many * (1 << 20)),),
            axes=("tp",),
            source="a.py:3",
        )
        seen.add(plan("dp:2,tp:4"), 1.0, terms(found))
    of_state = [Finding(rule="lost-donation", array=f"args[{i}]", bytes=PART) for i in range(2)]
    seen.add(plan("dp:8"), 2.0, terms(*of_state))
    notices = seen.notices(2)
    assert len([one for one in notices if "wide reduction" in one]) == 1
    assert len([one for one in notices if "args[" in one]) == 2


def test_a_plan_is_counted_once_for_a_line() -> None:
    seen = FindingsOfPlans()
    found = [
        Finding(
            rule="wide-reduction",
            array=shape,
            bytes=(Monomial(coefficient=many),),
            axes=("tp",),
            source="a.py:3",
        )
        for shape, many in (("f32[8]", 2e6), ("f32[16]", 8e6))
    ]
    seen.add(plan("dp:2,tp:4"), 1.0, terms(*found))
    (notice,) = seen.notices(2)
    assert "f32[16]" in notice and "[1 of 2 plans" in notice
