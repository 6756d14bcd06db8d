"""MaxText: `ici_*_parallelism` and `dcn_*_parallelism`, names of remat policies, and the batch of a
device.

Keys, defaults and the formula of the batch: `maxtext/configs/base.yml` and `types.py` of 0.2.5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from automesh.errors import UsageError
from automesh.report.export.nouns import (
    AxisSize,
    ExportFormat,
    Setting,
    microbatch_rows,
    multiplied_batch,
    refuse,
)
from automesh_frameworks.exports.comment import head, xla_flags
from automesh_frameworks.exports.source_text import as_count, as_size, key_values
from automesh_frameworks.exports.yaml_text import yaml_tree

# In the order of `mesh_axes`; the keys call the axis `stage` `pipeline`.
_AXES = (
    "diloco",
    "data",
    "pipeline",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
# Keys that MaxText reads, but that are no part of a mesh.
_WITHOUT_EFFECT = "sequence"
_ALL = (*_AXES, _WITHOUT_EFFECT)
_NETWORKS = ("ici", "dcn")
_DEFAULTS = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}
_POLICIES = (
    "custom",
    "minimal_flash",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "minimal_offloaded",
    "qkv_proj_offloaded",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "save_out_proj",
    "save_qkv_proj",
)
_TITLE, _SEEN_IN = "MaxText", "maxtext 0.2.5"
_REMAT, _ACCUMULATION, _BATCH = (
    "remat_policy",
    "gradient_accumulation_steps",
    "per_device_batch_size",
)
_NOT_RECOMPUTED, _PIPELINE = "none", "pipeline"
_FLAGS, _SHARD_MODE = "compile_xla_flags", "shard_mode"


def _write(settings: tuple[Setting, ...]) -> str:
    (setting,) = settings
    by_name = {axis.name: axis for axis in setting.axes}
    pipeline = by_name.get(_PIPELINE)
    if pipeline is not None and -1 in (pipeline.ici, pipeline.dcn):
        raise refuse(
            _TITLE,
            f"it takes an open size of `{_PIPELINE}` for no pipeline",
            hint="name the devices with --select",
        )
    values: dict[str, object] = {}
    for network in _NETWORKS:
        for name in _ALL:
            axis = by_name.get(name, AxisSize(name=name))
            values[f"{network}_{name}_parallelism"] = axis.ici if network == "ici" else axis.dcn
    if setting.remat is not None:
        values[_REMAT] = setting.remat
    values |= _batch(setting)
    if setting.explicit:
        values[_SHARD_MODE] = "explicit"
    if setting.compiler_options:
        values[_FLAGS] = xla_flags(setting)
    values |= dict(setting.extra)
    notes = [
        "Global batch = per_device_batch_size * devices * gradient_accumulation_steps"
        + (f" = {setting.global_batch}." if setting.global_batch else "; not said by the rule.")
    ]
    if setting.remat == _NOT_RECOMPUTED:
        # `jax.checkpoint` around every scanned layer, with no policy: `layers/nnx_decoders.py`.
        notes.append(
            "Under `none`, too, scanned layers are recomputed: scan_layers=false keeps all."
        )
    return head(settings, _TITLE, _SEEN_IN, notes) + "".join(
        f"{key}: {json.dumps(value)}\n" for key, value in values.items()
    )


def _batch(setting: Setting) -> dict[str, object]:
    found: dict[str, object] = {}
    steps = setting.accumulation
    if setting.per_device_batch:
        found[_BATCH] = setting.per_device_batch
    elif setting.global_batch:
        steps = steps or 1
        if not setting.num_devices:
            raise refuse(
                _TITLE,
                "its batch is one of a device, and the rule leaves the number of devices open",
                hint="name the devices with --select",
            )
        found[_BATCH] = _of_a_device(microbatch_rows(setting, _TITLE), setting)
    elif steps > 1:
        raise multiplied_batch(_TITLE, steps)
    if steps:
        found[_ACCUMULATION] = steps
    return found


def _of_a_device(rows: int, setting: Setting) -> float:
    """Returns the batch of a device, which MaxText multiplies by the number of devices.

    Raises:
      UsageError: the product would be another number of rows, or MaxText cannot split them for its
        pipeline.
    """
    devices = setting.num_devices
    share = rows / devices
    # In binary fractions 29 / 100 * 100 is less than 29, and MaxText rounds down.
    if int(devices * share) != rows:
        raise refuse(
            _TITLE,
            f"{rows} rows are no share of its {devices} devices that can be written exactly",
            hint="give a --batch of a multiple of the devices",
        )
    stages = math.prod(
        size for axis in setting.axes if axis.name == _PIPELINE for size in (axis.ici, axis.dcn)
    )
    if rows % stages:
        raise refuse(
            _TITLE,
            f"it deals the {rows} rows of a microbatch to {stages} pipeline stages in equal parts",
            hint="give another --batch",
        )
    return share


def _read(text: str) -> tuple[Setting, ...]:
    values = _values(text)
    axes: list[AxisSize] = []
    for name in _ALL:
        keys = [f"{network}_{name}_parallelism" for network in _NETWORKS]
        ici, dcn = (as_size(values.get(key, _DEFAULTS.get(key, 1)), key) for key in keys)
        if name == _WITHOUT_EFFECT and (ici, dcn) != (1, 1):
            raise UsageError(
                f"`{keys[0]}` and `{keys[1]}` are {ici} and {dcn}, and MaxText's mesh has no such "
                "axis: it parses them and does nothing",
                hint="leave them at 1; the axis for long sequences is `context`",
            )
        if name != _WITHOUT_EFFECT:
            axes.append(AxisSize(name=name, ici=ici, dcn=dcn))
    setting = Setting(
        axes=tuple(axes),
        remat=str(values[_REMAT]) if values.get(_REMAT) is not None else None,
        accumulation=as_count(values.get(_ACCUMULATION)) or 0,
        compiler_options=_options(str(values.get(_FLAGS) or "")),
        explicit=values.get(_SHARD_MODE) == "explicit",
    )
    return (_with_batch(setting, values.get(_BATCH)),)


def _values(text: str) -> Mapping[str, Any]:
    """Returns the keys of a YAML file, or of a command line with `key=value`."""
    known = {f"{network}_{name}_parallelism" for network in _NETWORKS for name in _ALL}
    words = key_values(text)
    if known & words.keys():
        return words
    tree = yaml_tree(text)
    if not {*known, "base_config", _REMAT, _BATCH} & tree.keys():
        raise UsageError(
            "the file has none of MaxText's keys, such as `ici_fsdp_parallelism`",
            hint="give a YAML configuration, or a command with `ici_fsdp_parallelism=8`",
        )
    return tree


def _with_batch(setting: Setting, said: object) -> Setting:
    try:
        rows = float(said) if isinstance(said, (str, int, float)) else 0.0
    except ValueError:
        rows = 0.0
    if not rows > 0 or rows == float("inf"):
        return setting
    by_device = replace(setting, per_device_batch=rows)
    # As in MaxText: first whole rows for all devices, then the microbatches.
    whole = int(setting.num_devices * rows) * (setting.accumulation or 1)
    if whole:
        return replace(setting, global_batch=whole)
    return by_device


def _options(flags: str) -> tuple[tuple[str, str | bool | int], ...]:
    found: list[tuple[str, str | bool | int]] = []
    for name, value in key_values(flags).items():
        number = as_count(value)
        logical = {"true": True, "false": False}.get(value)
        found.append(
            (name, logical if logical is not None else value if number is None else number)
        )
    return tuple(found)


MAXTEXT = ExportFormat(
    name="maxtext",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=_AXES,
    names=(
        ("dp", "data"),
        ("pp", "pipeline"),
        ("stage", "pipeline"),
        ("fsdp", "fsdp"),
        ("fsdp2", "fsdp_transpose"),
        ("sp", "context"),
        ("cp", "context"),
        ("tp", "tensor"),
        ("model", "tensor"),
        ("ep", "expert"),
    ),
    # `minimal` keeps the results of projections, which are the products without batch dimensions.
    remat=(
        ("none", "none"),
        ("full", "full"),
        ("dots", "minimal"),
        *((name, name) for name in _POLICIES),
    ),
    remat_knob=_REMAT,
    own_knobs=("custom_mesh_and_rule",),
    explicit=True,
    batch_axes=("data", "fsdp", "fsdp_transpose", "expert"),
    write=_write,
    read=_read,
)
