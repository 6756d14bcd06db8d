"""All frameworks by name: a rules file written in their words, and their files read as rules.

Their words are in plug-ins, which are found by the entry points `automesh.exports`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.targets import parse_target
from automesh.mesh.config import Rules
from automesh.mesh.infer import resolve_shape
from automesh.mesh.rules.file import format_rules
from automesh.mesh.rules.rule import MeshRule, check_selector, escape, first_match
from automesh.mesh.rules.tree import rules_from_tree
from automesh.mesh.shape import HybridMeshShape
from automesh.plugins.entry_points import installed, load
from automesh.plugins.offered import EXPORTS, offered
from automesh.reading import parse_json
from automesh.report.export.nouns import NO_WORDS, AxisSize, ExportFormat, ExportWords, Setting
from automesh.report.export.translate import rule_of, setting_of

JSON = "json"
"""automesh's own rules file as JSON, which `automesh.load` reads, too."""


def names() -> tuple[str, ...]:
    """Lists the formats that a rules file can be written to and read from: those of this
    repository's plug-ins, installed or not, those of other plug-ins, and JSON."""
    known = offered(EXPORTS)
    return (*known, *sorted(installed(EXPORTS).keys() - set(known)), JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Granules:
    """The devices of a target, which sizes that are left open are inferred from."""

    selector: str
    num_devices: int
    num_granules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A framework's file as rules, and what of it was not taken over."""

    rules: Rules
    notes: tuple[str, ...] = ()


def export_rules(
    rules: Rules,
    name: str,
    *,
    select: str = "",
    words: ExportWords = NO_WORDS,
    granules: Granules | None = None,
) -> str:
    """Writes rules as the text that a framework reads.

    Args:
      name: one of `names()`.
      select: name of the target whose rule is written; empty: the only one, or all of them where
        the framework keeps rules by target.
      granules: of the target, to infer sizes that a rule leaves open.

    Raises:
      UsageError: an unknown framework, no such rule, several rules, or one that the framework
        cannot say.
    """
    chosen = _chosen(rules, select, is_many=name == JSON or format_called(name).many)
    if name == JSON:
        kept = Rules(axes=rules.axes, batch_axes=rules.batch_axes, rules=chosen)
        return format_rules(kept, as_json=True)
    framework = format_called(name)
    if granules is not None:
        chosen = tuple(_resolved(rule, granules) for rule in chosen)
    return framework.write(tuple(setting_of(rules, rule, framework, words) for rule in chosen))


def import_rules(
    text: str,
    name: str,
    *,
    match: str = "",
    words: ExportWords = NO_WORDS,
    granules: Granules | None = None,
    source: Path = Path("file"),
) -> Imported:
    """Reads the rules of a framework's file, in automesh's words.

    Args:
      match: for a file that names no target, the pattern of the rule; by default the name of
        `granules`, else `.*`.
      granules: of the target whose rule alone is read, with all sizes inferred.

    Raises:
      UsageError: an unknown framework, or a file that does not say a mesh.
    """
    if name == JSON:
        rules = rules_from_tree(_json_tree(text, source), source=source)
        return Imported(rules=rules)
    framework = format_called(name)
    try:
        settings = framework.read(text)
        if granules is not None:
            # Sizes for these devices hold for no others that its pattern matches.
            one = replace(_selected(settings, granules), match="")
            settings = (_resolved_setting(one, granules),)
        read = [rule_of(setting, framework, words) for setting in settings]
    except UsageError as error:
        raise UsageError(f"`{source}`: {error.message}", hint=error.hint) from None
    except RecursionError:
        raise UsageError(f"`{source}`: its expressions are nested too deep") from None
    fallback = match or (escape(granules.selector) if granules else "")
    found = [
        replace(rule, match=fallback) if fallback and not setting.match else rule
        for rule, setting in zip(read, settings, strict=True)
    ]
    axes = found[0].axes
    rules = Rules(
        axes=axes,
        batch_axes=found[0].batch_axes or (),
        rules=tuple(_in_file(rule, found[0]) for rule in found),
    )
    return Imported(rules=rules, notes=tuple(note for one in settings for note in one.notes))


def _json_tree(text: str, source: Path) -> Mapping[str, Any]:
    tree = parse_json(text)
    if not isinstance(tree, Mapping):
        raise UsageError(f"`{source}` must hold an object")
    return cast("Mapping[str, Any]", tree)


def granules_of(target: str) -> Granules | None:
    """Returns the devices that a target's name means; None if it means no particular ones.

    >>> granules_of("cpu:8")
    Granules(selector='cpu-8', num_devices=8, num_granules=1)
    """
    virtual = re.fullmatch(r"cpu[-:]([0-9]{1,5})", target.strip())
    if virtual:
        count = int(virtual[1])
        return Granules(selector=f"cpu-{count}", num_devices=count, num_granules=1)
    try:
        absent = parse_target(target, {}).absent if target != "local" else None
    except UsageError:
        return None
    if absent is None:
        return None
    return Granules(
        selector=absent.selector,
        num_devices=absent.num_devices,
        num_granules=absent.fabric.num_granules,
    )


def _in_file(rule: MeshRule, first: MeshRule) -> MeshRule:
    """Leaves out what the file has already."""
    is_same = rule.axes == first.axes
    batch = None if is_same and rule.batch_axes == first.batch_axes else rule.batch_axes
    return replace(rule, axes=() if is_same else rule.axes, batch_axes=batch)


def format_called(name: str) -> ExportFormat:
    """Returns the export format of a framework.

    Raises:
      UsageError: it is unknown, or its plug-in is not installed or cannot be loaded.
    """
    known = names()
    if name not in known:
        raise UsageError(
            f"`{name}` is not a framework that automesh knows{did_you_mean(name, known)}",
            hint=f"known are {', '.join(known)}",
        )
    found: ExportFormat = load(EXPORTS, name, ExportFormat, what=f"the format of {name}")
    return found


def _chosen(rules: Rules, select: str, *, is_many: bool) -> tuple[MeshRule, ...]:
    if select:
        index = first_match(rules.rules, check_selector(select))
        if index == len(rules.rules):
            said = "; ".join(rules.explain(select)) or "there are no rules"
            raise UsageError(
                f"no rule matches `{select}`: {said}", hint="search for that target first"
            )
        return (replace(rules.rules[index], axes=rules.axes_of(rules.rules[index])),)
    if not rules.rules:
        raise UsageError("the file has no rules", hint="search first: `automesh search train.py`")
    if len(rules.rules) > 1 and not is_many:
        raise UsageError(
            f"the file has {len(rules.rules)} rules, and the framework takes one: "
            + ", ".join(f"`{rule.match}`" for rule in rules.rules),
            hint="name the target with --select",
        )
    return rules.rules


def _selected(settings: Sequence[Setting], granules: Granules) -> Setting:
    """Selects the setting for a target: the first whose pattern matches; no pattern comes last."""
    rules = [MeshRule(match=setting.match or ".*", mesh_shape=None) for setting in settings]
    index = first_match(rules, granules.selector)
    if index == len(rules):
        said = ", ".join(f"`{rule.match}`" for rule in rules)
        raise UsageError(f"none of its rules matches `{granules.selector}`: {said}")
    return settings[index]


def _resolved(rule: MeshRule, granules: Granules) -> MeshRule:
    shape = resolve_shape(
        rule.hybrid_shape, num_devices=granules.num_devices, num_granules=granules.num_granules
    )
    return replace(rule, mesh_shape=shape)


def _resolved_setting(setting: Setting, granules: Granules) -> Setting:
    ici = tuple(axis.ici for axis in setting.axes)
    dcn = tuple(axis.dcn for axis in setting.axes)
    shape = resolve_shape(
        ici if setting.flat else HybridMeshShape(ici, dcn),
        num_devices=granules.num_devices,
        num_granules=granules.num_granules,
    )
    sizes = zip(setting.axes, shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    axes = tuple(AxisSize(name=axis.name, ici=i, dcn=d) for axis, i, d in sizes)
    # As MaxText does it: whole rows of all devices, then the microbatches.
    batch = int(setting.per_device_batch * granules.num_devices) * (setting.accumulation or 1)
    return replace(
        setting,
        axes=axes,
        flat=False,
        global_batch=setting.global_batch or batch,
        per_device_batch=0.0 if batch else setting.per_device_batch,
    )
