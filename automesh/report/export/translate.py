"""From a rule to a framework's words and back: names of axes, remat, the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import MeshAxis, Scalar, spelled
from automesh.mesh.axis_types import AUTO
from automesh.mesh.config import Rules
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.shape import HybridMeshShape
from automesh.report.export.nouns import AxisSize, ExportFormat, ExportWords, Setting, refuse

REMAT = "remat"
ACCUMULATION = "microbatches"
BATCH = "batch"
PER_DEVICE = "per_device_batch"
# What scripts call the rows of one update.
_BATCHES = (BATCH, "batch_size", "global_batch", "global_batch_size", "train_batch_size")
_ACCUMULATIONS = (
    ACCUMULATION,
    "gradient_accumulation_steps",
    "grad_acc_steps",
    "grad_accum",
    "accumulation",
)
_EXPLICIT = "explicit"
_NOT_KNOBS = ("mapping", "compiler_options", "axis_types")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def setting_of(
    rules: Rules, rule: MeshRule, framework: ExportFormat, words: ExportWords
) -> Setting:
    """Translates one of the rules for a framework.

    Raises:
      UsageError: the framework cannot say it; names the axis or knob, and what to do.
    """
    names = rules.axes_of(rule)
    called = _names_of(names, framework, words)
    batch = rules.batch_axes_of(rule)
    knobs = dict(rule.knobs)
    for name in words.leave_out:
        if name not in (*knobs, *_NOT_KNOBS):
            raise UsageError(
                f"the rule `{rule.match}` has no knob `{name}` to leave out"
                f"{did_you_mean(name, knobs)}",
                hint=f"its knobs are: {', '.join(knobs) or 'none'}",
            )
        knobs.pop(name, None)
    if rule.mapping and not framework.mesh_only and "mapping" not in words.leave_out:
        said = ", ".join(name for name, _ in rule.mapping.axes)
        raise refuse(
            framework.title,
            f"it splits the arrays of your own script, by {said}"
            if rule.shardings
            else f"it maps logical axes of your own `build` ({said})",
            hint="give --leave-out mapping, and map them in the framework's own configuration",
        )
    sizes = _sizes(rule, names, called, framework)
    remat, accumulation, global_batch, per_device = None, 0, 0, 0.0
    if not framework.mesh_only:
        called_remat = REMAT if REMAT in knobs else framework.remat_knob
        remat = _remat(called_remat, knobs.pop(called_remat, None), framework, words)
        for name in _ACCUMULATIONS:
            if knobs.get(name) == 0:  # As the framework's configuration says.
                del knobs[name]
        accumulation = _count(knobs, _ACCUMULATIONS)
        global_batch = _count(knobs, _BATCHES) or words.global_batch
        per_device = _per_device(knobs)
    keep_options = "compiler_options" not in words.leave_out
    return Setting(
        match=rule.match,
        axes=sizes,
        batch_axes=None if batch == () else tuple(called[name] for name in batch if name in called),
        remat=remat,
        accumulation=accumulation,
        global_batch=global_batch,
        per_device_batch=per_device,
        extra=_extra(knobs, framework, words),
        compiler_options=tuple(rule.compiler_options.items()) if keep_options else (),
        explicit=_is_explicit(rule, framework, words),
        evidence=rule.evidence,
    )


def rule_of(setting: Setting, framework: ExportFormat, words: ExportWords) -> MeshRule:
    """Makes a rule in automesh's words from a setting in a framework's file.

    In a flat mesh the first axis with a size other than 1 spans the granules, as in the frameworks.

    Raises:
      UsageError: two axes would get one name, or it is open what lies between granules.
    """
    setting = replace(setting, axes=_kept(setting, framework))
    called = _names_back(setting, framework, words)
    knobs: dict[str, Scalar] = {}
    if setting.remat is not None:
        back = {theirs: ours for ours, theirs in reversed(framework.remat)}
        back |= {framework_name: ours for ours, framework_name in words.remat.items()}
        knobs[REMAT] = back.get(setting.remat, setting.remat)
    if setting.accumulation:
        knobs[ACCUMULATION] = setting.accumulation
    if setting.global_batch:
        knobs[BATCH] = setting.global_batch
    elif setting.per_device_batch:
        knobs[PER_DEVICE] = setting.per_device_batch
    theirs = {key: knob for knob, key in words.knobs.items()}
    knobs |= {theirs.get(key, key): value for key, value in setting.extra}
    axes = tuple(called[axis.name] for axis in setting.axes)
    batch = framework.batch_axes if setting.batch_axes is None else setting.batch_axes
    return MeshRule(
        match=setting.match or ".*",
        mesh_shape=_shape(setting),
        knobs=knobs,
        compiler_options=dict(setting.compiler_options),
        axes=axes,
        axis_types=_EXPLICIT if setting.explicit else (),
        batch_axes=tuple(called[name] for name in batch if name in called),
        evidence=setting.evidence,
    )


def _kept(setting: Setting, framework: ExportFormat) -> tuple[AxisSize, ...]:
    """Leaves out axes that only the framework has and that are not used."""
    theirs = {name for _, name in framework.names} or {axis.name for axis in setting.axes}
    return tuple(axis for axis in setting.axes if axis.is_used or axis.name in theirs)


def mesh_text(rule: MeshRule, axes: Sequence[str]) -> str:
    """Returns the mesh of a rule as `--baseline` takes it, with -1 for open sizes.

    >>> rule = MeshRule(match="x", mesh_shape=HybridMeshShape((1, 4), (2, 1)))
    >>> mesh_text(rule, ("dp", "fsdp"))
    'dcn.dp:2,fsdp:4'
    """
    shape = rule.hybrid_shape
    dcn = [f"dcn.{n}:{s}" for n, s in zip(axes, shape.dcn_mesh_shape) if s != 1]
    ici = [f"{n}:{s}" for n, s in zip(axes, shape.ici_mesh_shape) if s != 1]
    return ",".join([*dcn, *ici]) or f"{axes[0]}:1"


def _shape(setting: Setting) -> HybridMeshShape:
    ici = [axis.ici for axis in setting.axes]
    dcn = [axis.dcn for axis in setting.axes]
    first = next((axis for axis in setting.axes if axis.ici != 1), None)
    if setting.flat and first is not None and -1 in ici:
        if first.ici != -1:
            raise UsageError(
                f"the mesh {tuple(ici)} does not say what of its first axis, `{first.name}`, lies "
                "between slices or nodes",
                hint="name the devices with --target",
            )
        # All granules lie on the axis that takes what is left, and the rest of it inside.
        dcn[setting.axes.index(first)] = -1
    return HybridMeshShape(ici, dcn)


def _names_of(names: Sequence[str], framework: ExportFormat, words: ExportWords) -> dict[str, str]:
    """Returns the framework's name of every axis of the rule that it has a name for."""
    table = dict(framework.names)
    called: dict[str, str] = {}
    for ours, theirs in words.axes.items():
        if ours not in names:
            raise UsageError(
                f"--axis {ours}={theirs}: the rule has no axis `{ours}`{did_you_mean(ours, names)}",
                hint=f"its axes are {', '.join(names)}",
            )
        MeshAxis(name=theirs)  # No name of an axis, no text of a configuration.
        if theirs not in framework.axes and not framework.other_axes:
            raise UsageError(
                f"--axis {ours}={theirs}: {framework.title} has no axis `{theirs}`"
                f"{did_you_mean(theirs, framework.axes)}",
                hint=f"its axes are {', '.join(framework.axes)}",
            )
    for name in names:
        theirs = words.axes.get(name) or table.get(name)
        if theirs is None and (name in framework.axes or not framework.axes):
            theirs = name
        if theirs is not None:
            called[name] = theirs
    return called


def _sizes(
    rule: MeshRule, names: Sequence[str], called: Mapping[str, str], framework: ExportFormat
) -> tuple[AxisSize, ...]:
    shape = rule.hybrid_shape
    found: dict[str, AxisSize] = {}
    owner: dict[str, str] = {}
    for name, ici, dcn in zip(names, shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True):
        if (ici, dcn) == (1, 1):
            continue
        theirs = called.get(name)
        if theirs is None:
            known = ", ".join(framework.axes)
            raise refuse(
                framework.title,
                f"its axis `{name}` has no counterpart among {known}",
                hint=f"say which it is with --axis {name}=NAME",
            )
        if theirs in found:
            raise refuse(
                framework.title,
                f"both `{owner[theirs]}` and `{name}` are its axis `{theirs}`",
                hint=f"say which another one is with --axis {name}=NAME",
            )
        found[theirs] = AxisSize(name=theirs, ici=ici, dcn=dcn)
        owner[theirs] = name
    # A framework without names of its own has those of the rule, all of them.
    first = framework.axes or tuple(called[name] for name in names)
    order = [*first, *(name for name in found if name not in first)]
    return tuple(found.get(name, AxisSize(name=name)) for name in order)


def _names_back(setting: Setting, framework: ExportFormat, words: ExportWords) -> dict[str, str]:
    table = {theirs: ours for ours, theirs in reversed(framework.names)}
    table |= {theirs: ours for ours, theirs in words.axes.items()}
    called: dict[str, str] = {}
    for axis in setting.axes:
        ours = table.get(axis.name, axis.name)
        if ours in called.values():
            raise UsageError(
                f"two axes of the file would be called `{ours}`",
                hint=f"name the one called `{axis.name}` with --axis NAME={axis.name}",
            )
        called[axis.name] = ours
    return called


def _remat(
    knob: str, value: Scalar | None, framework: ExportFormat, words: ExportWords
) -> str | None:
    if value is None:
        return None
    name = spelled(value)
    if knob == framework.remat_knob and name == framework.as_configured:
        return None
    table = dict(framework.remat)
    # A script with a switch has no names: on is to keep nothing.
    wanted = words.remat.get(name, {"true": "full", "false": "none"}.get(name, name))
    if wanted in table or wanted in table.values():
        return table.get(wanted, wanted)
    known = ", ".join(dict.fromkeys(table)) or "none"
    raise refuse(
        framework.title,
        f"it has no name for the knob {knob}={name}",
        hint=f"say what it is with --remat {name}=NAME, or give --leave-out {knob}; known: {known}",
    )


def _count(knobs: dict[str, Scalar], names: Sequence[str]) -> int:
    for name in names:
        value = knobs.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            del knobs[name]
            return value
    return 0


def _per_device(knobs: dict[str, Scalar]) -> float:
    value = knobs.get(PER_DEVICE)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        del knobs[PER_DEVICE]
        return float(value)
    return 0.0


def _extra(
    knobs: Mapping[str, Scalar], framework: ExportFormat, words: ExportWords
) -> tuple[tuple[str, Scalar], ...]:
    found: list[tuple[str, Scalar]] = []
    for name, key in words.knobs.items():
        if name not in knobs or not _NAME.fullmatch(key):
            raise UsageError(
                f"--knob {name}={key}: "
                + (f"`{key}` is not a key" if name in knobs else f"the rule has no knob `{name}`"),
                hint=f"its knobs are: {', '.join(knobs) or 'none'}",
            )
    for name, value in knobs.items():
        is_known = name in words.knobs or name in framework.own_knobs
        if not is_known and not framework.mesh_only:
            raise refuse(
                framework.title,
                f"it is not known what the knob {name}={spelled(value)} of your script is there",
                hint=f"name its key with --knob {name}=KEY, or give --leave-out {name}",
            )
        found.append((words.knobs.get(name, name), value))
    return tuple(found)


def _is_explicit(rule: MeshRule, framework: ExportFormat, words: ExportWords) -> bool:
    kinds = set(rule.axis_types)
    if kinds <= {AUTO} or "axis_types" in words.leave_out:
        return False
    if kinds == {_EXPLICIT} and framework.explicit:
        return True
    raise refuse(
        framework.title,
        f"its mesh has axes of the type {', '.join(sorted(kinds - {AUTO}))}",
        hint="give --leave-out axis_types if the framework's own step does without",
    )
