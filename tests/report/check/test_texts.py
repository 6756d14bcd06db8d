"""Verdicts by bounds, and what is printed of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from automesh.mesh.config import Rules
from automesh.mesh.evidence import Evidence, ProgramFacts
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.rules.tree import rules_from_tree, tree_of_rules
from automesh.mesh.shape import HybridMeshShape
from automesh.report.check.facts import compare
from automesh.report.check.nouns import SAID, RuleCheck, RulesChecked
from automesh.report.check.texts import as_junit, as_markdown

THEN = ProgramFacts(
    fingerprint="a",
    flops=1000,
    peak_bytes=10**6,
    undonated_bytes=2000,
    step_s=0.1,
    collectives=(("all-gather fsdp", 2, 10**6), ("all-reduce dp", 1, 4)),
)


def worse(now: ProgramFacts) -> list[str]:
    return [one.what for one in compare(THEN, now) if one.verdict == "regressed"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, []),
        ({"fingerprint": "b"}, []),
        ({"peak_bytes": 1_049_000}, []),
        ({"peak_bytes": 1_051_000}, ["memory"]),
        ({"peak_bytes": 100}, []),
        ({"undonated_bytes": 11_900}, []),
        ({"undonated_bytes": 12_100}, ["outputs beside donated memory"]),
        ({"undonated_bytes": 0}, []),
        ({"undonated_bytes": -1}, []),
        ({"flops": 1009}, []),
        ({"flops": 1011}, ["FLOPs"]),
        ({"flops": 500}, ["FLOPs"]),
        ({"step_s": 0.109}, []),
        ({"step_s": 0.111}, ["step time, predicted"]),
        ({"collectives": (("all-gather fsdp", 3, 1_019_000),)}, []),
        ({"collectives": (("all-gather fsdp", 2, 1_021_000),)}, ["all-gather fsdp"]),
        ({"collectives": (*THEN.collectives, ("all-to-all ep", 1, 1023))}, []),
        ({"collectives": (*THEN.collectives, ("all-to-all ep", 1, 1024))}, ["all-to-all ep"]),
        ({"collectives": ()}, []),
    ],
)
def test_a_figure_counts_beyond_its_bound(change: dict[str, object], what: list[str]) -> None:
    assert worse(replace(THEN, **change)) == what  # pyright: ignore


def test_outputs_of_less_than_a_kib_are_not_counted() -> None:
    small = replace(THEN, peak_bytes=10_000, undonated_bytes=0)
    for size, verdict in ((1024, "same"), (1025, "regressed")):
        found = {
            one.what: one.verdict for one in compare(small, replace(small, undonated_bytes=size))
        }
        assert found["outputs beside donated memory"] == verdict
    known = replace(small, undonated_bytes=-1)
    assert "outputs beside donated memory" not in {one.what for one in compare(known, small)}


def test_figures_of_zero_are_compared() -> None:
    assert [one.verdict for one in compare(ProgramFacts(), ProgramFacts())] == ["same"] * 3
    assert worse(replace(THEN, flops=0)) == ["FLOPs"]


def sample() -> RulesChecked:
    now = replace(THEN, peak_bytes=2 * 10**6, collectives=(("all-to-all ep", 1, 2048),))
    bad = RuleCheck(
        match="cpu-|8",
        plan="dp:8 <b>",
        target="cpu:8",
        status="regressed",
        reason="beyond the bounds: memory",
        changes=compare(THEN, now),
        notes=("jax 1 then, 2 now",),
        explain="automesh explain train.py dp:8",
        now=now,
    )
    good = RuleCheck(match="cpu-4", plan="dp:4", status="holds", changes=compare(THEN, THEN))
    gone = RuleCheck(match="tpu-\x1b[31m", status="unknown", reason="no devices & no \x07")
    return RulesChecked(script="train.py", against="mesh_rules.toml", rules=(bad, good, gone))


def test_all_texts_say_the_same() -> None:
    checked = sample()
    text, table = checked.text(), as_markdown(checked)
    assert "3 rules: 1 hold, 1 regressed, 1 not checked" in text
    assert "3 rules: 1 hold, 1 regressed, 1 not checked" in table
    assert "appeared" in text and "gone" in text and "next: automesh explain" in text
    assert "\x1b" not in text + table and "<b>" not in table
    assert "cpu-\\|8" in table
    marks = {row.split(" | ")[2]: row.split(" | ")[1] for row in table.splitlines()[4:]}
    assert marks["memory"] == marks["all-to-all ep"] == SAID["regressed"]
    assert marks["all-gather fsdp"] == "changed"
    assert as_junit(checked).startswith("<?xml version=")
    suite = ElementTree.fromstring(as_junit(checked))
    assert suite.attrib["failures"] == "1" and suite.attrib["errors"] == "1"
    assert len(suite) == 3
    assert json.loads(json.dumps(checked.to_json()))["exit_code"] == 1


def test_figures_stand_below_their_headings() -> None:
    lines = sample().text().splitlines()
    head = next(line for line in lines if line.split() == ["then", "now", "change"])
    memory = next(line for line in lines if line.split()[:1] == ["memory"])
    assert [head.index(word) for word in ("then", "now", "change")] == [
        memory.index(word) for word in ("977 KiB", "1.91 MiB", "+100")
    ]


def test_exit_codes() -> None:
    bad, good, gone = sample().rules

    def code(*rules: RuleCheck) -> int:
        return RulesChecked(script="x", against="y", rules=rules).exit_code

    assert [code(good), code(good, gone), code(good, gone, bad), code()] == [0, 2, 1, 2]


def test_the_figures_are_kept_in_a_rule_and_old_rules_are_read() -> None:
    rule = MeshRule(
        match="cpu-8",
        mesh_shape=HybridMeshShape((8,), (1,)),
        evidence=Evidence(kind="compiled", program=THEN),
    )
    rules = Rules(axes=("dp",), rules=(rule,))
    tree = tree_of_rules(rules)
    assert rules_from_tree(tree, source=Path("x.toml")) == rules
    del tree["rule"][0]["evidence"]["program"], tree["rule"][0]["evidence"]["collectives"]
    old = rules_from_tree(tree, source=Path("x.toml"))
    assert old.rules[0].evidence.program == ProgramFacts()
