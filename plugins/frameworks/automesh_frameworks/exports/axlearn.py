"""AXLearn: `mesh_rules`, pairs of a pattern and modifiers of a trainer's configuration.

Names: `axlearn/common/trainer_config_modifier.py`, `common/utils.py` (HybridMeshShape) and
`experiments/text/gpt/common.py` (the six axes, `mesh_shape_from_axes`) of July 2026. The first
pattern that matches the whole selector wins, as in automesh. Accumulation splits the batch of the
trainer.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from automesh.errors import UsageError
from automesh.report.export.nouns import ExportFormat, Setting
from automesh_frameworks.exports.comment import head
from automesh_frameworks.exports.mesh_rules_text import (
    HYBRID,
    called,
    calls_of,
    hybrid_text,
    pairs_in,
    setting_of_shape,
    shape_in,
)
from automesh_frameworks.exports.source_text import (
    as_count,
    as_strings,
    literal,
    python_literal,
    python_tree,
    values_named,
)

_TITLE, _SEEN_IN = "AXLearn", "axlearn of July 2026"
_AXES = ("pipeline", "data", "expert", "fsdp", "seq", "model")
_LAYER = "model.decoder.transformer.layer"
_CHAIN, _MESH, _REMAT, _ACCUMULATION = (
    "ChainConfigModifier",
    "MeshShapeModifier",
    "RematSpecModifier",
    "GradientAccumulationModifier",
)
_POLICIES = (
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
_NOT_RECOMPUTED = "None"


def _write(settings: tuple[Setting, ...]) -> str:
    modifiers = [_MESH, _CHAIN]
    if any(setting.remat is not None for setting in settings):
        modifiers.append(_REMAT)
    if any(setting.accumulation > 1 for setting in settings):
        modifiers.append(_ACCUMULATION)
    lines = ["import jax"] if any(_has_policy(setting) for setting in settings) else []
    if any(_has_policy(setting) for setting in settings):
        lines.append("from axlearn.common.base_layer import RematSpec")
    names = "".join(f"    {name},\n" for name in sorted(modifiers))
    lines.append(f"from axlearn.common.trainer_config_modifier import (\n{names})")
    if any(not setting.flat for setting in settings):
        lines.append(f"from axlearn.common.utils import {HYBRID}")
    names = tuple(axis.name for axis in settings[0].axes)
    lines += ["", f"mesh_axis_names = {python_literal(names)}", "mesh_rules = ("]
    lines += [_rule(setting) for setting in settings]
    notes = [
        f"train_batch_size of {setting.match}: {setting.global_batch}, which accumulation splits."
        for setting in settings
        if setting.global_batch
    ]
    # Its modifier splits only a part of the batch into a loop, so the program would be another one.
    notes += [
        f"Accumulation of {setting.match}: none. If your configuration has a "
        "learner.forward_fn_transformation that accumulates, remove it."
        for setting in settings
        if setting.accumulation == 1
    ]
    return head(settings, _TITLE, _SEEN_IN, notes) + "\n".join([*lines, ")", ""])


def _has_policy(setting: Setting) -> bool:
    return setting.remat not in (None, _NOT_RECOMPUTED)


def _rule(setting: Setting) -> str:
    parts = [f"{_MESH}.default_config().set(mesh_shape={hybrid_text(setting)})"]
    if setting.remat is not None:
        spec = (
            f"RematSpec(prevent_cse=False, policy=jax.checkpoint_policies.{setting.remat})"
            if _has_policy(setting)
            else _NOT_RECOMPUTED
        )
        parts.append(f'{_REMAT}.default_config().set(remat_policies={{"{_LAYER}": {spec}}})')
    if setting.accumulation > 1:
        parts.append(f"{_ACCUMULATION}.default_config().set(grad_acc_steps={setting.accumulation})")
    listed = "".join(f"                {part},\n" for part in parts)
    return (
        f"    (\n        {python_literal(setting.match)},\n        {_CHAIN}.default_config().set(\n"
        f"            config_modifiers=[\n{listed}            ],\n        ),\n    ),"
    )


def _read(text: str) -> tuple[Setting, ...]:
    tree = python_tree(text)
    said = next((node for node in values_named(tree, "mesh_axis_names")), None)
    value = None if said is None else literal(said)
    names = _AXES if value is None else as_strings(value, "mesh_axis_names")
    pairs = pairs_in(tree)
    inside = {id(node) for _, value in pairs for node in ast.walk(value)}
    found = [_setting(pattern, value, names) for pattern, value in pairs]
    defaults = [node for node in values_named(tree, "mesh_shape") if id(node) not in inside]
    if len({ast.dump(node) for node in defaults}) == 1:
        found.append(setting_of_shape("", shape_in(defaults[0], names), names))
    if not found:
        raise UsageError(
            "the file has no `mesh_rules`, and no single `mesh_shape`",
            hint="give Python in which they are spelled out",
        )
    return tuple(found)


def _setting(pattern: str, value: ast.expr, names: tuple[str, ...]) -> Setting:
    shapes = [call["mesh_shape"] for call in calls_of(value, _MESH) if "mesh_shape" in call]
    is_modifier = bool(shapes) or (isinstance(value, ast.Call) and called(value.func) == "set")
    if is_modifier and not shapes:
        raise UsageError(f"the rule `{pattern}` has no {_MESH}: its mesh is the trainer's default")
    setting = setting_of_shape(pattern, shape_in(shapes[0] if shapes else value, names), names)
    steps = [call.get("grad_acc_steps") for call in calls_of(value, _ACCUMULATION)]
    count = as_count(literal(steps[0])) if steps and steps[0] is not None else None
    remat, notes = _policy(pattern, value)
    known = {_CHAIN, _MESH, _REMAT, _ACCUMULATION}
    others = [name for name in _modifiers(value) if name not in known]
    if others:
        notes.append(f"`{pattern}`: not taken over: {', '.join(others)}")
    return replace(setting, remat=remat, accumulation=count or 0, notes=tuple(notes))


def _policy(pattern: str, value: ast.expr) -> tuple[str | None, list[str]]:
    specs = [
        spec
        for call in calls_of(value, _REMAT)
        for policies in [call.get("remat_policies")]
        if isinstance(policies, ast.Dict)
        for spec in policies.values
    ]
    if not specs:
        return None, []
    named = set(map(_policy_name, specs))
    if len(named) == 1 and (name := named.pop()):
        return name, []
    return None, [f"`{pattern}`: its remat policies have no single name, and are not taken over"]


def _policy_name(spec: ast.expr) -> str:
    match spec:
        case ast.Constant(value=None):
            return _NOT_RECOMPUTED
        case ast.Call(keywords=keywords):
            policy = next((one.value for one in keywords if one.arg == "policy"), None)
            return "" if policy is None else called(policy)
        case _:
            return ""


def _modifiers(value: ast.expr) -> list[str]:
    found = (
        called(node.func.value)
        for node in ast.walk(value)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "default_config"
    )
    return list(dict.fromkeys(name for name in found if name.endswith("Modifier")))


AXLEARN = ExportFormat(
    name="axlearn",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=_AXES,
    names=(
        ("pp", "pipeline"),
        ("dp", "data"),
        ("ep", "expert"),
        ("fsdp", "fsdp"),
        ("sp", "seq"),
        ("tp", "model"),
    ),
    other_axes=True,
    remat=(
        ("none", _NOT_RECOMPUTED),
        ("full", "nothing_saveable"),
        ("dots", "dots_with_no_batch_dims_saveable"),
        *((name, name) for name in _POLICIES),
    ),
    remat_knob="remat_policy",
    as_configured="config",
    batch_axes=("data", "expert", "fsdp"),
    many=True,
    write=_write,
    read=_read,
)
