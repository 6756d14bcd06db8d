"""EasyDeL: `sharding_axis_dims`, and how eformer distributes sizes between granules.

Keys: `easydel/infra/base_config.py` and `easydel/trainers/training_configurations.py` of 0.3.0.
`sharding_axis_dims` are the sizes of the whole mesh. With several slices eformer 0.0.101
(`escale/mesh/creation.py`) first divides the first axis that is a multiple of the number of slices,
whatever `sharding_dcn_axis_dims` says, and then adds the sizes of `sharding_dcn_axis_dims` between
the slices. So the mesh is the requested one only if both choose the same axis. `total_batch_size`
are the rows of one microbatch: the trainer loads that times the accumulation
(`BaseTrainer.training_batch_size`), and splits it again.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from automesh.errors import UsageError
from automesh.report.export.nouns import (
    AxisSize,
    ExportFormat,
    Setting,
    microbatch_rows,
    multiplied_batch,
    refuse,
)
from automesh_frameworks.exports.comment import head
from automesh_frameworks.exports.source_text import (
    as_count,
    as_sizes,
    as_strings,
    literal,
    python_literal,
    python_tree,
    values_named,
)

_TITLE, _SEEN_IN = "EasyDeL", "easydel 0.3.0"
_AXES = ("dp", "fsdp", "ep", "tp", "sp")
_DIMS, _NAMES, _DCN = "sharding_axis_dims", "sharding_axis_names", "sharding_dcn_axis_dims"
_REMAT, _ACCUMULATION, _BATCH = (
    "gradient_checkpointing",
    "gradient_accumulation_steps",
    "total_batch_size",
)
_POLICIES = (
    "everything_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "mlp_notsaveable",
    "attn_notsaveable",
    "mlp_attn_notsaveable",
)


def _write(settings: tuple[Setting, ...]) -> str:
    (setting,) = settings
    config: dict[str, object] = {
        _DIMS: _dims(setting),
        _NAMES: tuple(axis.name for axis in setting.axes),
        _DCN: _dcn(setting),
    }
    if setting.remat is not None:
        config[_REMAT] = setting.remat
    config |= dict(setting.extra)
    training = _training(setting)
    notes = [
        "config_kwargs is for the model, training_arguments for TrainingArguments.",
        "Global batch = total_batch_size * gradient_accumulation_steps.",
    ]
    text = head(settings, _TITLE, _SEEN_IN, notes) + _dict("config_kwargs", config)
    return text + (_dict("training_arguments", training) if training else "")


def _training(setting: Setting) -> dict[str, object]:
    found: dict[str, object] = {}
    steps = setting.accumulation
    if setting.global_batch:
        found[_BATCH] = microbatch_rows(setting, _TITLE)
    elif steps > 1:
        raise multiplied_batch(_TITLE, steps)
    if steps:
        found[_ACCUMULATION] = steps
    return found


def _dict(name: str, values: dict[str, object]) -> str:
    lines = [
        f"    {python_literal(key)}: {python_literal(value)},\n" for key, value in values.items()
    ]
    return f"{name} = {{\n{''.join(lines)}}}\n"


def _dims(setting: Setting) -> tuple[int, ...]:
    dims = tuple(-1 if -1 in (axis.ici, axis.dcn) else axis.ici * axis.dcn for axis in setting.axes)
    if dims.count(-1) > 1:
        raise refuse(
            _TITLE,
            "it leaves the sizes of two axes open, and one is inferred there",
            hint="name the devices with --select",
        )
    return dims


def _dcn(setting: Setting) -> tuple[int, ...] | None:
    dcn = tuple(axis.dcn for axis in setting.axes)
    if setting.flat or set(dcn) == {1}:
        return None
    dims = _dims(setting)
    across = [index for index, size in enumerate(dcn) if size != 1]
    divided = _divided_axis(dims, dcn)
    if divided < 0 and -1 in (*dims, *dcn):
        raise refuse(
            _TITLE,
            "which axis eformer divides by the number of granules depends on sizes that the rule "
            "leaves open",
            hint="name the devices with --select",
        )
    if across != [divided]:
        names = ", ".join(setting.axes[index].name for index in across)
        what = "no axis" if divided < 0 else f"its axis `{setting.axes[divided].name}`"
        raise refuse(
            _TITLE,
            f"its granules lie along {names}, and eformer divides {what} by the number of granules",
            hint=f"take a rule whose granules lie along {_first(setting, divided)} alone",
        )
    if setting.match.startswith("gpu"):
        raise refuse(
            _TITLE,
            "without slices eformer splits the mesh by processes, not by nodes",
            hint="take a rule for one node, or for TPU slices",
        )
    return dcn


def _first(setting: Setting, divided: int) -> str:
    return f"`{setting.axes[max(divided, 0)].name}`"


def _divided_axis(dims: Sequence[int], dcn: Sequence[int]) -> int:
    """Returns the axis that eformer divides by the number of granules; -1 if there is none, or if
    it depends on open sizes."""
    granules = 0 if -1 in dcn else math.prod(dcn)
    for index, dim in enumerate(dims):
        if dim == -1:
            # The remaining number of devices is a multiple of the granules if all granules are
            # along this axis.
            return index if dcn[index] in (-1, granules) else -1
        if granules == 0 and dim != 1:
            return -1
        if granules and dim % granules == 0:
            return index
    return -1


def _read(text: str) -> tuple[Setting, ...]:
    tree = python_tree(text)
    dims = as_sizes(_one(tree, _DIMS), _DIMS)
    said = _one(tree, _NAMES)
    names = _AXES if said is None else as_strings(said, _NAMES)
    if len(dims) != len(names):
        raise UsageError(f"`{_DIMS}` has {len(dims)} sizes for the {len(names)} axes {names}")
    dcn = _one(tree, _DCN)
    sizes = _parts(dims, None if dcn is None else as_sizes(dcn, _DCN))
    remat = _one(tree, _REMAT)
    steps, batch = as_count(_one(tree, _ACCUMULATION)), as_count(_one(tree, _BATCH))
    rows = max(batch or 0, 0) * max(steps or 1, 1)
    return (
        Setting(
            axes=tuple(
                AxisSize(name=n, ici=i, dcn=d) for n, (i, d) in zip(names, sizes, strict=True)
            ),
            flat=dcn is None,
            remat=remat if isinstance(remat, str) else None,
            accumulation=max(steps or 0, 0),
            global_batch=rows,
        ),
    )


def _parts(dims: Sequence[int], dcn: Sequence[int] | None) -> list[tuple[int, int]]:
    """Returns the sizes inside a granule and between granules that eformer makes from both
    settings."""
    if dcn is None:
        return [(dim, 1) for dim in dims]
    if len(dcn) != len(dims):
        raise UsageError(f"`{_DCN}` has {len(dcn)} sizes for {len(dims)} axes")
    divided, granules = _divided_axis(dims, dcn), math.prod(dcn)
    if divided < 0 and -1 in (*dims, *dcn):
        raise UsageError(
            f"which axis of {tuple(dims)} eformer divides by the number of granules depends on "
            f"sizes that are open, and so does the mesh with `{_DCN}` {tuple(dcn)}",
            hint="give a file with all sizes",
        )
    if divided < 0:
        raise UsageError(
            f"no axis of {tuple(dims)} is a multiple of the {granules} granules: eformer refuses it"
        )
    inside = [
        dim // granules if index == divided and -1 not in (dim, *dcn) else dim
        for index, dim in enumerate(dims)
    ]
    return list(zip(inside, dcn, strict=True))


def _one(tree: ast.AST, name: str) -> object:
    """Returns the value of a key; None if it is not set.

    Raises:
      UsageError: it is set to several values.
    """
    found = list(dict.fromkeys(str(literal(node)) for node in values_named(tree, name)))
    if len(found) > 1:
        raise UsageError(
            f"the file sets `{name}` to {len(found)} values: {', '.join(found)}",
            hint="give a file with one model",
        )
    return next((literal(node) for node in values_named(tree, name)), None)


EASYDEL = ExportFormat(
    name="easydel",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=_AXES,
    names=tuple((name, name) for name in _AXES),
    remat=(
        ("none", ""),
        ("full", "nothing_saveable"),
        ("dots", "dots_with_no_batch_dims_saveable"),
        *((name, name) for name in _POLICIES),
    ),
    remat_knob="gradient_checkpointing",
    batch_axes=("dp", "fsdp"),
    write=_write,
    read=_read,
)
