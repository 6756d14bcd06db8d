"""`automesh presets`: the rules for public models that come with automesh, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from automesh.mesh.rules.rule import MeshRule, matches_only
from automesh.mesh.rules.shipped import PREFIX, Preset
from automesh.mesh.rules.tree import tree_of_rule
from automesh.report.blocks.columns import Column, figures_column, text_column
from automesh.report.blocks.nouns import Report, Section, Sentence, Table, lines_of
from automesh.report.export.translate import mesh_text
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds

# What a narrow terminal does without, in this order.
_DROPPED = ("evidence", "memory", "knobs", "step time")
# Which packages tell a reader whether a preset is of his time.
_TOLD = ("jax", "libtpu", "maxtext")
_NONE = "no presets are here: `python -m benchmarks.presets` in a checkout makes them"


def report_of(found: Sequence[Preset]) -> Report:
    """Makes a table for each preset, with a line for each target."""
    if not found:
        sections = [Section(blocks=(Sentence(text=_NONE),))]
    else:
        sections = [_preset(preset, whole=len(found) == 1) for preset in found]
        sections.append(Section(blocks=(lines_of(*_guide(found)),)))
    return Report(
        sections=tuple(sections), facts=lambda: {"presets": [_facts(preset) for preset in found]}
    )


def _preset(preset: Preset, *, whole: bool) -> Section:
    """Reports one preset; `whole` adds all that is known of it."""
    lines = list(_missing(preset))
    if whole:
        lines += [(target, clean(made.arguments)) for target, made in preset.records.items()]
    columns = _columns(preset) if preset.rules.rules else ()
    said = [("", f"{target}: {text}") for target, text in lines]
    return Section(
        title=clean(preset.name),
        blocks=(Table(columns=tuple(columns), dropped=_DROPPED), lines_of(*said)),
    )


def _columns(preset: Preset) -> list[Column]:
    rules = preset.rules.rules
    known = [rule.evidence for rule in rules]
    steps = [format_seconds(one.step_s) if one.step_s else "" for one in known]
    memory = [format_bytes(one.hbm_bytes) if one.hbm_bytes else "" for one in known]
    return [
        text_column("target", [clean(matches_only(rule.match) or rule.match) for rule in rules],
                    most=12),
        text_column("mesh", [clean(_mesh(preset, rule)) for rule in rules], most=10),
        text_column("knobs", [clean(_knobs(rule)) for rule in rules], most=12),
        figures_column("step time", steps),
        figures_column("memory", memory),
        figures_column("evidence", [one.kind for one in known], justify="left"),
    ]  # fmt: skip


def _mesh(preset: Preset, rule: MeshRule) -> str:
    """Returns the mesh as text, without knobs."""
    return mesh_text(rule, preset.rules.axes_of(rule)).partition(" ")[0]


def _knobs(rule: MeshRule) -> str:
    return " ".join(f"{name}={value}" for name, value in rule.knobs.items())


def _missing(preset: Preset) -> Iterator[tuple[str, str]]:
    """Lists the targets without a rule, each with the reason."""
    for target, made in preset.records.items():
        if target not in preset.targets:
            yield target, f"no rule: {clean(made.reason)}"


def _guide(found: Sequence[Preset]) -> list[tuple[str, str]]:
    known = [(preset.name, target) for preset in found for target in preset.targets if target]
    read = [
        ("read", f'automesh.load("{PREFIX}{name}").select("{target}")')
        for name, target in known[:1]
    ]
    evidence = (
        "all times are predicted: compiled, from the schedule of the target's own compiler; "
        "estimated, without compiling"
    )
    return [*read, ("evidence", evidence), *_versions(found)]


def _versions(found: Sequence[Preset]) -> list[tuple[str, str]]:
    """Lists the versions that made the presets, with how many rules each has made."""
    made = [
        ", ".join(f"{name} {one.versions[name]}" for name in _TOLD if name in one.versions)
        for preset in found
        for target, one in preset.records.items()
        if target in preset.targets
    ]
    told = [f"{words} ({count(made.count(words), 'rule')})" for words in dict.fromkeys(made)]
    return [("made by", clean("; ".join(told)))] if told else []


# `automesh presets --json`.


def _facts(preset: Preset) -> dict[str, Any]:
    """Returns a preset with its rules and how they were made, as plain JSON values."""
    return {
        "name": preset.name,
        "rules": [tree_of_rule(rule, preset.rules.axes_of(rule)) for rule in preset.rules.rules],
        "targets": {
            target: {
                "arguments": made.arguments,
                "seconds": made.seconds,
                "made": made.made,
                "versions": made.versions,
                "reason": made.reason,
            }
            for target, made in preset.records.items()
        },
    }
