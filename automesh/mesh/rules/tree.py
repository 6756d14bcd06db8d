"""Reads the tree of a rules file (TOML or JSON) strictly into `Rules`, and writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import MeshAxis, Scalar
from automesh.mesh.axis_types import as_axis_types
from automesh.mesh.config import Rules
from automesh.mesh.evidence import NO_EVIDENCE, NO_FACTS, Evidence, ProgramFacts, RunnerUp
from automesh.mesh.mapping import NONE, LogicalMapping, MappedAxes, check_mapped_axes
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.rules.shardings import Shardings, spelled_shardings
from automesh.mesh.settings import Settings
from automesh.mesh.shape import HybridMeshShape
from automesh.mesh.strict_files import check_tree

SCHEMA = 1
_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Amount = Annotated[list[_Count], Field(min_length=2, max_length=2)]
_Pair = Annotated[list[_Finite], Field(min_length=2, max_length=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunnerUpTable:
    plan: str
    slower: _Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramTable:
    fingerprint: str
    flops: _Count = 0
    peak_bytes: _Count = 0
    undonated_bytes: _Count | None = None
    step_s: _Finite = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvidenceTable:
    kind: Literal["measured", "compiled", "estimated"]
    step_s: _Finite = 0.0
    interval_s: _Pair | None = None
    bracket_s: _Pair | None = None
    exposed_s: _Finite = 0.0
    hbm_bytes: _Count = 0
    reserve_bytes: _Count = 0
    stage_bytes: list[_Count] | None = None
    mfu: _Finite = 0.0
    runner_up: _RunnerUpTable | None = None
    tried: dict[str, _Count] = field(default_factory=dict)
    study: str = ""
    made: str = ""
    values: Literal["synthetic", "user"] | None = None
    reference: str = ""
    command: str = ""
    split: str = ""
    not_searched: str = ""
    program: _ProgramTable | None = None
    collectives: dict[str, _Amount] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuleTable:
    match: str
    axes: list[str] | None = None
    batch_axes: list[str] | None = None
    axis_types: str | list[str] | None = None
    ici: dict[str, int]
    dcn: dict[str, int] = field(default_factory=dict)
    mapping: dict[str, str | list[str]] = field(default_factory=dict)
    shardings: dict[str, list[str | list[str]]] = field(default_factory=dict)
    knobs: dict[str, Scalar] = field(default_factory=dict)
    compiler_options: dict[str, Scalar] = field(default_factory=dict)
    evidence: _EvidenceTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RulesTable:
    schema: int
    axes: list[str]
    batch_axes: list[str] = field(default_factory=list)
    rule: list[_RuleTable] = field(default_factory=list)


def rules_from_tree(tree: Mapping[str, Any], *, source: Path) -> Rules:
    """Reads the tree of a rules file.

    Raises:
      UsageError: names the file, the key, what was expected and what was got.
    """
    _check_schema(tree.get("schema", SCHEMA), source)
    table = check_tree(tree, _RulesTable, source=source)
    try:
        _check_axis_names(table.axes)
        rules = tuple(
            _rule(rule, table.axes, f"rule[{index}]") for index, rule in enumerate(table.rule)
        )
        return Rules(axes=tuple(table.axes), batch_axes=tuple(table.batch_axes), rules=rules)
    except UsageError as error:
        raise UsageError(f"`{source}`: {error.message}", hint=error.hint) from None


def tree_of_rules(rules: Rules) -> dict[str, Any]:
    """Makes the tree that `rules_from_tree` reads back as an equal value."""
    return {
        "schema": SCHEMA,
        "axes": list(rules.axes),
        "batch_axes": list(rules.batch_axes),
        "rule": [tree_of_rule(rule, rules.axes_of(rule)) for rule in rules.rules],
    }


def tree_of_rule(rule: MeshRule, axes: tuple[str, ...]) -> dict[str, Any]:
    """Makes one entry under `rule`, without sizes of 1 and unknown values.

    Args:
      axes: of the rule, its own or those of the file.
    """
    shape = rule.hybrid_shape
    tree: dict[str, Any] = {"match": rule.match}
    if rule.axes:
        tree["axes"] = list(rule.axes)
    if rule.batch_axes is not None:
        tree["batch_axes"] = list(rule.batch_axes)
    if rule.axis_types:
        is_one = len(set(rule.axis_types)) == 1
        tree["axis_types"] = rule.axis_types[0] if is_one else list(rule.axis_types)
    tree |= {
        "ici": {name: size for name, size in zip(axes, shape.ici_mesh_shape) if size != 1},
        "dcn": {name: size for name, size in zip(axes, shape.dcn_mesh_shape) if size != 1},
        "mapping": {name: _as_written(mapped) for name, mapped in rule.mapping.axes},
        "knobs": dict(rule.knobs),
        "compiler_options": dict(rule.compiler_options),
    }
    if not rule.mapping:
        del tree["mapping"]
    if rule.shardings:
        tree["shardings"] = spelled_shardings(rule.shardings)
    if rule.evidence.kind != "none":
        tree["evidence"] = _tree_of_evidence(rule.evidence)
    return tree


def _as_written(axes: MappedAxes) -> str | list[str]:
    """Writes a value as people do: TOML has no null."""
    return list(axes) if len(axes) > 1 else axes[0] if axes else NONE


def _tree_of_evidence(evidence: Evidence) -> dict[str, Any]:
    runner_up = evidence.runner_up
    tree: dict[str, Any] = {
        "kind": evidence.kind,
        "step_s": evidence.step_s,
        "interval_s": list(evidence.interval_s),
        "bracket_s": list(evidence.bracket_s),
        "exposed_s": evidence.exposed_s,
        "hbm_bytes": evidence.hbm_bytes,
        "reserve_bytes": evidence.reserve_bytes,
        "stage_bytes": list(evidence.stage_bytes),
        "mfu": evidence.mfu,
        "runner_up": {"plan": runner_up.plan, "slower": runner_up.slower} if runner_up.plan else {},
        "tried": dict(evidence.tried),
        "study": evidence.study,
        "made": evidence.made,
        "values": evidence.values,
        "reference": evidence.reference,
        "command": evidence.command,
        "split": evidence.split,
        "not_searched": evidence.not_searched,
        "program": _tree_of_program(evidence.program),
        "collectives": {name: [runs, size] for name, runs, size in evidence.program.collectives},
        "uncounted": list(evidence.uncounted),
        "findings": list(evidence.findings),
        "versions": dict(evidence.versions),
        "environment": dict(evidence.environment),
    }
    return {key: value for key, value in tree.items() if value}


def _tree_of_program(program: ProgramFacts) -> dict[str, Any]:
    if not program.fingerprint:
        return {}
    tree = {
        "fingerprint": program.fingerprint,
        "flops": program.flops,
        "peak_bytes": program.peak_bytes,
        "undonated_bytes": program.undonated_bytes,
        "step_s": program.step_s,
    }
    return {key: value for key, value in tree.items() if value != -1}


def _check_schema(schema: object, source: Path) -> None:
    if schema == SCHEMA or not isinstance(schema, int):
        return  # A wrong type is reported with those of the other keys.
    if schema > SCHEMA:
        raise UsageError(
            f"`{source}` has schema {schema}, newer than {SCHEMA}, which this automesh reads",
            hint="update automesh",
        )
    raise UsageError(f"`{source}` has schema {schema}; there is none before {SCHEMA}")


def _check_axis_names(names: Sequence[str]) -> None:
    for name in names:
        MeshAxis(name=name)


def _rule(table: _RuleTable, of_file: list[str], where: str) -> MeshRule:
    axes = of_file if table.axes is None else table.axes
    try:
        _check_axis_names(axes)
        shape = HybridMeshShape(
            _sizes(table.ici, axes, f"{where}.ici"), _sizes(table.dcn, axes, f"{where}.dcn")
        )
        mapping = LogicalMapping(table.mapping)
        check_mapped_axes(mapping.axes, axes)
        return MeshRule(
            match=table.match,
            mesh_shape=shape,
            mapping=mapping,
            shardings=Shardings(table.shardings),
            knobs=Settings(table.knobs),
            compiler_options=Settings(table.compiler_options),
            evidence=_evidence(table.evidence) if table.evidence else NO_EVIDENCE,
            axis_types=() if table.axis_types is None else as_axis_types(table.axis_types, axes),
            axes=tuple(table.axes or ()),
            batch_axes=table.batch_axes,
        )
    except UsageError as error:
        message = error.message if where in error.message else f"`{where}`: {error.message}"
        raise UsageError(message, hint=error.hint) from None


def _sizes(table: Mapping[str, int], axes: list[str], where: str) -> tuple[int, ...]:
    for name in table:
        if name not in axes:
            meant = did_you_mean(name, axes) or f"; axes are {', '.join(axes)}"
            raise UsageError(f"`{where}.{name}` is not one of the rule's axes{meant}")
    return tuple(table.get(name, 1) for name in axes)


def _program(table: _EvidenceTable) -> ProgramFacts:
    program = table.program
    if program is None:
        return NO_FACTS
    return ProgramFacts(
        fingerprint=program.fingerprint,
        flops=program.flops,
        peak_bytes=program.peak_bytes,
        undonated_bytes=-1 if program.undonated_bytes is None else program.undonated_bytes,
        step_s=program.step_s,
        collectives=tuple((name, runs, size) for name, (runs, size) in table.collectives.items()),
    )


def _evidence(table: _EvidenceTable) -> Evidence:
    runner_up = table.runner_up
    return Evidence(
        kind=table.kind,
        step_s=table.step_s,
        interval_s=tuple(table.interval_s or ()),
        bracket_s=tuple(table.bracket_s or ()),
        exposed_s=table.exposed_s,
        hbm_bytes=table.hbm_bytes,
        reserve_bytes=table.reserve_bytes,
        stage_bytes=tuple(table.stage_bytes or ()),
        mfu=table.mfu,
        runner_up=RunnerUp(plan=runner_up.plan, slower=runner_up.slower)
        if runner_up
        else RunnerUp(),
        tried=tuple(table.tried.items()),
        study=table.study,
        made=table.made,
        values=table.values or "",
        reference=table.reference,
        command=table.command,
        split=table.split,
        not_searched=table.not_searched,
        program=_program(table),
        uncounted=tuple(table.uncounted),
        findings=tuple(table.findings),
        versions=tuple(table.versions.items()),
        environment=tuple(table.environment.items()),
    )
