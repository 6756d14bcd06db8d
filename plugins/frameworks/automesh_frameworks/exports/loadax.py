"""Loadax: a `MeshConfig` with `mesh_rules`, with the axis names of the rules.

Names: `loadax/sharding/mesh_shape.py` of Loadax's repository (`05fcde76`). There a pattern matches
the beginning of a selector (`re.match`), so exported patterns end with `$`.
"""

from __future__ import annotations

from dataclasses import replace

from automesh.errors import UsageError
from automesh.report.export.nouns import ExportFormat, Setting, refuse
from automesh_frameworks.exports.comment import head
from automesh_frameworks.exports.mesh_rules_text import (
    HYBRID,
    hybrid_text,
    pairs_in,
    setting_of_shape,
    shape_in,
)
from automesh_frameworks.exports.source_text import (
    as_strings,
    literal,
    python_literal,
    python_tree,
    values_named,
)

_TITLE, _SEEN_IN = "Loadax", "loadax 05fcde76"
_BEGIN, _END = "(?:", ")$"


def _write(settings: tuple[Setting, ...]) -> str:
    first, *_ = settings
    names = tuple(axis.name for axis in first.axes)
    batch = _batch_of(first)
    for setting in settings:
        if tuple(axis.name for axis in setting.axes) != names or _batch_of(setting) != batch:
            raise refuse(
                _TITLE,
                f"`{setting.match}` and `{first.match}` have other axes, or other ones for a batch",
                hint="choose one with --select",
            )
    rules = "".join(
        f"        ({python_literal(_BEGIN + setting.match + _END)}, {hybrid_text(setting)}),\n"
        for setting in settings
    )
    notes = [
        f"Knobs of {setting.match}, for your own step: "
        + " ".join(f"{name}={value}" for name, value in setting.extra)
        for setting in settings
        if setting.extra
    ]
    if len(settings) > 1:
        notes.append(
            "Where no pattern matches, Loadax takes mesh_shape: the mesh of the first rule."
        )
    axes = (
        f"    mesh_axis_names={python_literal(names)},\n"
        f"    batch_axis_names={python_literal(batch)},\n"
    )
    return (
        f"{head(settings, _TITLE, _SEEN_IN, notes)}"
        f"from loadax.sharding.mesh_shape import {HYBRID}, MeshConfig\n\n"
        f"mesh_config = MeshConfig(\n    mesh_shape={hybrid_text(first)},\n{axes}"
        f"    mesh_rules=[\n{rules}    ],\n)\n"
    )


def _batch_of(setting: Setting) -> tuple[str, ...]:
    return setting.batch_axes or ()


def _read(text: str) -> tuple[Setting, ...]:
    tree = python_tree(text)
    found = [literal(node) for node in values_named(tree, "mesh_axis_names")]
    if len(found) != 1 or found[0] is None:
        raise UsageError(
            f"the file spells out {len(found)} times `mesh_axis_names`, and must do so once",
            hint="give Python with one MeshConfig",
        )
    names = as_strings(found[0], "mesh_axis_names")
    batch = _batch([literal(node) for node in values_named(tree, "batch_axis_names")], names)
    settings = [
        setting_of_shape(_whole(pattern), shape_in(value, names), names)
        for pattern, value in pairs_in(tree)
    ]
    shapes = list(values_named(tree, "mesh_shape"))
    if not settings and shapes:
        settings = [setting_of_shape("", shape_in(shapes[0], names), names)]
    if not settings:
        raise UsageError("the file has neither `mesh_rules` nor a `mesh_shape`")
    return tuple(replace(setting, batch_axes=batch) for setting in settings)


def _batch(found: list[object], names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the batch axes. Loadax's default is `data`, which a mesh may not have."""
    if not found:
        return tuple(name for name in names if name == "data")
    return (found[0],) if isinstance(found[0], str) else as_strings(found[0], "batch_axis_names")


def _whole(pattern: str) -> str:
    """Returns a pattern for the whole of a selector, since Loadax only matches its beginning."""
    if pattern.startswith(_BEGIN) and pattern.endswith(_END):
        return pattern.removeprefix(_BEGIN).removesuffix(_END)
    return pattern[:-1] if pattern.endswith("$") else f"(?:{pattern}).*"


LOADAX = ExportFormat(
    name="loadax",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=(),
    names=(),
    other_axes=True,
    mesh_only=True,
    many=True,
    write=_write,
    read=_read,
)
