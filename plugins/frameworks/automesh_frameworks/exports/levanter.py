"""Levanter: `trainer.mesh` with `axes` and `dcn_axes`, and the rows of a device in a microbatch.

A name may not be in both `axes` and `dcn_axes`. So the part of an axis between slices gets a name
of its own, such as `data_dcn` for `data`, and the logical axes are mapped to both names, which
results in the same shards. Data parallelism already has such a name in Levanter: `replica_dcn`. The
schema is that of `levanter/utils/mesh.py` and `levanter/trainer.py` of marin-levanter 0.2.227.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import yaml

from automesh.errors import UsageError
from automesh.report.export.nouns import AxisSize, ExportFormat, Setting, refuse
from automesh_frameworks.exports.comment import head
from automesh_frameworks.exports.source_text import as_count, as_size
from automesh_frameworks.exports.yaml_text import yaml_tree

_TITLE, _SEEN_IN = "Levanter", "marin-levanter 0.2.227"
_DATA, _REPLICA, _MODEL, _DCN = "data", "replica", "model", "_dcn"
_BATCH = (_REPLICA, _DATA)
_REMAT = {"true": True, "false": False}
# The keys of `trainer` before `mesh` existed: data takes the remaining devices, in both networks.
_FORMER = ("model_axis_size", "replica_ici_axis_size", "replica_dcn_axis_size")


def _write(settings: tuple[Setting, ...]) -> str:
    (setting,) = settings
    mesh: dict[str, Any] = {
        "axes": {axis.name: axis.ici for axis in setting.axes},
        "dcn_axes": {f"{_REPLICA}{_DCN}": 1},
    }
    for axis in setting.axes:
        if axis.dcn != 1 or axis.name == _REPLICA:
            mesh["dcn_axes"][f"{axis.name}{_DCN}"] = axis.dcn
    split = {axis.name for axis in setting.axes if axis.dcn != 1} - {_REPLICA}
    rows = [name for name in setting.batch_axes or () if name not in _BATCH]
    if _DATA in split or rows:
        names = [*_BATCH, *rows]
        mesh["compute_mapping"] = {
            "batch": [part for name in names for part in _parts(name, split)]
        }
    if _DATA in split:
        mesh["param_mapping"] = {"embed": list(_parts(_DATA, split))}
    if _MODEL in split:
        parts = list(_parts(_MODEL, split))
        mesh["shared_mapping"] = {"mlp": parts, "heads": parts}
    trainer: dict[str, Any] = {"mesh": mesh, **_batch(setting)}
    tree: dict[str, Any] = {"trainer": trainer}
    if setting.remat is not None:
        tree["model"] = {"gradient_checkpointing": _REMAT.get(setting.remat, setting.remat)}
    tree |= dict(setting.extra)
    notes = [
        f"Map logical axes to `{axis.name}` in compute_mapping and param_mapping."
        for axis in setting.used
        if axis.name not in (*_BATCH, _MODEL, *rows)
    ]
    if any(axis.dcn != 1 for axis in setting.axes):
        notes.append("Sizes of dcn_axes need devices with a slice_index, as TPU slices have it.")
    text = yaml.dump(tree, Dumper=_WithoutAliases, sort_keys=False, default_flow_style=None)
    return head(settings, _TITLE, _SEEN_IN, notes) + text


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _parts(name: str, split: set[str]) -> tuple[str, ...]:
    """Returns the axes of Levanter's mesh that represent one axis, the slower network first."""
    return (f"{name}{_DCN}", name) if name in split or name == _REPLICA else (name,)


def _batch(setting: Setting) -> dict[str, int]:
    steps = setting.accumulation
    if not setting.global_batch:
        if steps > 1:
            raise refuse(
                _TITLE,
                f"it divides the batch by rows of a device, and the rule with its {steps} "
                "microbatches does not say the batch",
                hint="give the rows of one update with --batch",
            )
        return {}
    found = {"train_batch_size": setting.global_batch}
    ways = _ways(setting)
    if not ways:
        if steps > 1:
            raise refuse(
                _TITLE,
                "the rows of a device depend on sizes that the rule leaves open",
                hint="name the devices with --select",
            )
        return found | {"per_device_parallelism": -1}
    rows, rest = divmod(setting.global_batch, max(steps, 1) * ways)
    if rest:
        parts = f"{steps} microbatches over {ways} devices" if steps > 1 else f"{ways} devices"
        raise refuse(
            _TITLE,
            f"a batch of {setting.global_batch} rows is not a multiple of {parts}",
            hint="give another --batch",
        )
    return found | {"per_device_parallelism": rows if steps > 1 else -1}


def _ways(setting: Setting) -> int:
    """Returns the number of parts that a batch is split into; 0 while a size is open."""
    names = {*_BATCH, *(setting.batch_axes or ())}
    sizes = [s for axis in setting.axes if axis.name in names for s in (axis.ici, axis.dcn)]
    return 0 if -1 in sizes else math.prod(sizes)


def _read(text: str) -> tuple[Setting, ...]:
    tree = yaml_tree(text)
    trainer = _table(tree.get("trainer"), "trainer") if "trainer" in tree else tree
    former = [key for key in _FORMER if key in trainer]
    mesh = trainer.get("mesh")
    is_ours = isinstance(mesh, Mapping) and {"axes", "dcn_axes"} & mesh.keys()
    if "trainer" not in tree and not is_ours and not former:
        raise UsageError(
            "the file has no `trainer`, and no `mesh`", hint="give a configuration of Levanter"
        )
    if former and "mesh" not in trainer:
        model, ici, dcn = (as_size(trainer.get(key, 1), key) for key in _FORMER)
        axes = [
            AxisSize(name=_REPLICA, ici=ici, dcn=dcn),
            AxisSize(name=_DATA, ici=-1, dcn=-1),
            AxisSize(name=_MODEL, ici=model),
        ]
    else:
        axes = _axes(_table(trainer.get("mesh") or {}, "mesh"))
    model = tree.get("model")
    remat = model.get("gradient_checkpointing") if isinstance(model, Mapping) else None
    setting = Setting(
        axes=tuple(axes),
        remat=None if remat is None else str(remat).lower(),
        global_batch=max(as_count(trainer.get("train_batch_size")) or 0, 0),
    )
    return (_with_accumulation(setting, as_count(trainer.get("per_device_parallelism")) or -1),)


def _axes(mesh: Mapping[str, Any]) -> list[AxisSize]:
    """Returns the axes with Levanter's defaults: if the user leaves the size of an axis open, it
    replaces Levanter's open one."""
    own, own_dcn = (
        _table(mesh.get("axes", {}), "axes"),
        _table(mesh.get("dcn_axes", {}), "dcn_axes"),
    )
    ici = {name: as_size(size, f"axes.{name}") for name, size in own.items()}
    dcn = {name: as_size(size, f"dcn_axes.{name}") for name, size in own_dcn.items()}
    ici = {_REPLICA: 1, _DATA: 1 if -1 in ici.values() else -1, _MODEL: 1} | ici
    dcn = {f"{_REPLICA}{_DCN}": 1 if -1 in dcn.values() else -1} | dcn
    both = sorted(ici.keys() & dcn.keys())
    if both:
        raise UsageError(f"`{both[0]}` is in both `axes` and `dcn_axes`, which Levanter refuses")
    found = {name: AxisSize(name=name, ici=size) for name, size in ici.items()}
    for name, size in dcn.items():
        base = name.removesuffix(_DCN)
        base = base if base in found and base != name else name
        inside = found[base].ici if base in found else 1
        found[base] = AxisSize(name=base, ici=inside, dcn=size)
    return list(found.values())


def _with_accumulation(setting: Setting, rows: int) -> Setting:
    ways = _ways(setting)
    if rows < 1 or not setting.global_batch or not ways:
        return setting
    return replace(setting, accumulation=max(setting.global_batch // (rows * ways), 1))


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"`{what}` is {value!r}, and must be a table")
    return cast("Mapping[str, Any]", value)


LEVANTER = ExportFormat(
    name="levanter",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=(_REPLICA, _DATA, _MODEL),
    names=(("dp", _REPLICA), ("fsdp", _DATA), ("tp", _MODEL)),
    other_axes=True,
    batch_axes=_BATCH,
    remat=(
        ("none", "false"),
        ("full", "true"),
        *((name, name) for name in ("offload", "recompute", "save_all", "nested")),
    ),
    remat_knob="gradient_checkpointing",
    write=_write,
    read=_read,
)
