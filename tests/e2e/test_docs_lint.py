"""docs/lint.md: its examples have the findings that they show, and every rule has one."""

from __future__ import annotations

import linecache
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.report.findings import RULES
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
PRELUDE = re.findall(r"```python\n(import jax\n.*?)```", PAGE, re.DOTALL)[0]
EXAMPLES = {
    rule: (code, mesh, platform or "cpu", text)
    for rule, code, mesh, platform, text in re.findall(
        r"^## ([a-z0-9-]+)\n\n```python\n(.*?)```\n\n"
        r"<!-- (\S+)(?: (\w+))? -->\n```text\n(.*?)\n```",
        PAGE,
        re.DOTALL | re.MULTILINE,
    )
}


def test_every_rule_has_an_example_with_its_reason() -> None:
    assert set(EXAMPLES) == set(RULES)
    told = " ".join(PAGE.split())
    assert [rule for rule, words in RULES.items() if f"Why: {words.why}." not in told] == []


@pytest.mark.parametrize("rule", EXAMPLES)
def test_an_example_has_the_finding_that_is_shown(rule: str, tmp_path: Path) -> None:
    code, mesh, platform, text = EXAMPLES[rule]
    path = tmp_path / "example.py"
    path.write_text(PRELUDE + code)
    linecache.checkcache()
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    sizes = tuple((axis, int(size)) for axis, size in (one.split(":") for one in mesh.split(",")))
    programs = Programs(
        build=lambda mesh: build_on(scope["build"], mesh),
        axis_names=tuple(axis for axis, _ in sizes),
        platform=platform,
    )
    terms = propagate(programs, sizes=sizes, probes=(), enter=lambda _: None).terms
    (found,) = [one for one in terms.findings if one.rule == rule]
    shown = RULES[rule].what(found, dict(sizes))
    assert textwrap.wrap(shown, 100, break_on_hyphens=False) == text.splitlines()
    assert value_of(found.count, dict(sizes)) >= 1 and found.source.startswith("example.py:")
