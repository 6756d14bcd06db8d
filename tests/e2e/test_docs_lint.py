"""docs/lint.md: its examples have the findings that they show, and every rule has one."""

from __future__ import annotations

import linecache
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from automesh.cost.breakdown import break_down
from automesh.cost.terms import Finding, Terms, value_of
from automesh.hardware import chip_for
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import MeshAxis, Plan, parse_mesh
from automesh.mesh.plan_arrays import batch_of
from automesh.program.script.build import build_on
from automesh.report.findings import RULES
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from tests.support.paths import ROOT
from tests.support.samples.explain_samples import NO_LAYOUTS

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

DCN = "dcn."


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
    parts = [one.split(":") for one in mesh.split(",")]
    devices = math.prod(int(size) for _, size in parts)
    granules = math.prod(int(size) for axis, size in parts if axis.startswith(DCN))
    names = tuple(dict.fromkeys(axis.removeprefix(DCN) for axis, _ in parts))
    axes = parse_mesh(mesh, names, num_devices=devices, num_granules=granules)
    sizes = tuple((axis.name, axis.size) for axis in axes)
    programs = Programs(
        build=lambda mesh: build_on(scope["build"], mesh),
        axis_names=tuple(axis for axis, _ in sizes),
        platform=platform,
    )
    terms = propagate(programs, sizes=sizes, probes=(), enter=lambda _: None).terms
    findings = terms.findings if granules == 1 else _on_nodes(terms, axes)
    (found,) = [one for one in findings if one.rule == rule]
    shown = RULES[rule].what(found, dict(sizes))
    assert textwrap.wrap(shown, 100, break_on_hyphens=False) == text.splitlines()
    assert value_of(found.count, dict(sizes)) >= 1 and found.source.startswith("example.py:")


def _on_nodes(terms: Terms, axes: tuple[MeshAxis, ...]) -> tuple[Finding, ...]:
    """The findings on nodes of H100s, as many as the axes say."""
    plan = Plan(axes=axes)
    chip = chip_for("NVIDIA H100 80GB HBM3", "gpu")
    nodes = plan.num_granules
    fabric = Fabric(
        kind="switch", chip=chip, num_granules=nodes, granule_devices=plan.num_devices // nodes
    )
    speeds = datasheet_speeds(chip, fabric)
    hardware = HardwareModel(fabric=fabric, layouts=NO_LAYOUTS, speeds=speeds)
    return break_down(terms, batch_of([plan]), routes_of=hardware.routes, speeds=speeds).findings
