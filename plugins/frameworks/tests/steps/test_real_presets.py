"""Presets lowered again: today's MaxText gives the program that the rule was made from (long).

It needs MaxText, installed as the head of `test_real_maxtext.py` says. Nothing is compiled: the
step is lowered for the target's devices, which takes a minute or two for each rule.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest

from automesh import api
from automesh.hardware import parse_target
from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.rules.rule import MeshRule, matches_only
from automesh.mesh.rules.shipped import find_presets
from automesh.program.nouns import Inspection, Lowered
from automesh.tuner.preparation import step_ref
from automesh.tuner.workers import ask, one_worker, surroundings_of
from automesh.worker.messages import CompileJob, InspectJob
from benchmarks.presets.making import is_current

pytestmark = [
    pytest.mark.long,
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("maxtext") is None,
        reason="needs MaxText, installed as the head of test_real_maxtext.py says",
    ),
]
_LIMIT_S = 1800.0
COMPILED = [
    (preset, rule)
    for preset in find_presets()
    for rule in preset.rules.rules
    if rule.evidence.kind == "compiled"
]


def some() -> list[tuple[str, str]]:
    """Three rules, of as many models and targets as there are."""
    chosen: list[tuple[str, str]] = []
    for preset, rule in COMPILED:
        target = matches_only(rule.match)
        news = (preset.name not in {one for one, _ in chosen}) + (
            target not in {other for _, other in chosen}
        )
        if news == 2:
            chosen.append((preset.name, target))
    chosen += [
        pair
        for preset, rule in COMPILED
        if (pair := (preset.name, matches_only(rule.match))) not in chosen
    ]
    return chosen[:3]


def plan_of(rule: MeshRule, axes: tuple[str, ...]) -> Plan:
    shape = rule.hybrid_shape
    sizes = zip(axes, shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    return Plan(
        axes=tuple(MeshAxis(name=name, ici=ici, dcn=dcn) for name, ici, dcn in sizes),
        knobs=tuple(rule.knobs.items()),
        compiler_options=tuple(rule.compiler_options.items()),
    )


def lowered(name: str, target: str, plan_with: dict[str, str] | None = None) -> tuple[str, str]:
    """The fingerprint in a rule, and that of the step as it is lowered today."""
    (preset,) = find_presets(name)
    rule = next(one for one in preset.rules.rules if matches_only(one.match) == target)
    axes, made = preset.rules.axes_of(rule), preset.records[target]
    if not is_current(made, made.arguments):
        pytest.skip(f"made with {made.versions}")
    plan = plan_of(rule, axes)
    if plan_with:
        knobs = tuple((dict(plan.knobs) | plan_with).items())
        plan = replace(plan, knobs=knobs)
    options = api.SearchOptions(args=made.arguments.split(), dry_run=True)
    entry = api.read_request("maxtext", options, targets=[target]).entry
    aim = parse_target(target, os.environ)
    with one_worker(surroundings_of(aim)) as pool:
        looked = InspectJob(step=step_ref(entry, aim), axis_names=axes)
        inspected = ask(pool, looked, Inspection, _LIMIT_S)
        assert isinstance(inspected, Inspection), inspected
        job = CompileJob(step=step_ref(entry, aim, inspected), plan=plan, cache_dir="")
        answer = ask(
            pool, job, Lowered, _LIMIT_S, lambda one: {"go": False} if one.get("reply") else None
        )
    assert isinstance(answer, Lowered), answer
    return rule.evidence.program.fingerprint, answer.fingerprint


def test_there_are_three_to_lower() -> None:
    if len(COMPILED) < 3:
        pytest.skip(f"{len(COMPILED)} of the presets were compiled so far")
    assert len(set(some())) == 3


@pytest.mark.parametrize(("name", "target"), some())
def test_a_preset_lowers_to_the_program_that_was_compiled(name: str, target: str) -> None:
    then, now = lowered(name, target)
    assert then and then == now


def test_another_remat_policy_is_another_program() -> None:
    (name, target), *_ = some()
    (mine,) = [
        rule
        for preset, rule in COMPILED
        if (preset.name, matches_only(rule.match)) == (name, target)
    ]
    other = "full" if mine.knobs["remat_policy"] != "full" else "minimal"
    then, now = lowered(name, target, {"remat_policy": other})
    assert then != now
