"""Tunix: `model_config.mesh` with `shape` and `axis_names`, which are both texts that contain a
tuple.

Keys: `tunix/cli/config.py`, `tunix/cli/utils/model.py`, `tunix/models/llama3/model.py` and
`tunix/sft/peft_trainer.py` of google-tunix 0.1.7. Tunix calls `jax.make_mesh`, which has no sizes
between granules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

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
    python_tree,
)
from automesh_frameworks.exports.yaml_text import yaml_tree

_TITLE, _SEEN_IN = "Tunix", "google-tunix 0.1.7"
_SECTION, _TRAINING = "model_config", "training_config"
_REMAT, _ACCUMULATION, _BATCH = "remat_config", "gradient_accumulation_steps", "batch_size"


def _write(settings: tuple[Setting, ...]) -> str:
    (setting,) = settings
    across = [axis for axis in setting.axes if axis.dcn != 1]
    if across:
        raise refuse(
            _TITLE,
            f"its axis `{across[0].name}` has the size {across[0].dcn} between granules (slices or "
            "nodes), and a mesh of Tunix has one size for each axis",
            hint="take a rule for one slice or node",
        )
    open_axes = [axis for axis in setting.axes if axis.ici == -1]
    if open_axes:
        raise refuse(
            _TITLE,
            f"it infers no sizes, and that of its axis `{open_axes[0].name}` is open",
            hint="name the devices with --select",
        )
    model: dict[str, Any] = {
        "mesh": {
            "shape": _tuple([str(axis.ici) for axis in setting.axes]),
            "axis_names": _tuple([repr(axis.name) for axis in setting.axes]),
        }
    }
    if setting.remat is not None:
        model[_REMAT] = int(setting.remat)
    tree: dict[str, Any] = {_SECTION: model}
    steps = setting.accumulation
    if setting.global_batch:
        tree[_BATCH] = microbatch_rows(setting, _TITLE)
    elif steps > 1:
        raise multiplied_batch(_TITLE, steps)
    if steps:
        tree[_TRAINING] = {_ACCUMULATION: steps}
    tree |= dict(setting.extra)
    notes = ["Global batch = batch_size * gradient_accumulation_steps."]
    return head(settings, _TITLE, _SEEN_IN, notes) + yaml.safe_dump(tree, sort_keys=False)


def _tuple(parts: list[str]) -> str:
    return f"({','.join(parts)}{',' if len(parts) == 1 else ''})"


def _read(text: str) -> tuple[Setting, ...]:
    tree = yaml_tree(text)
    found = list(dict.fromkeys(_meshes(tree, set())))
    if len(found) != 1:
        said = "; ".join(f"{names} {sizes}" for names, sizes in found)
        raise UsageError(
            f"the file holds {len(found)} different meshes: {said}"
            if found
            else "the file has no `mesh` with `shape` and `axis_names`",
            hint="give a file with the `mesh` of one model",
        )
    ((names, sizes),) = found
    training = tree.get(_TRAINING)
    steps = as_count(training.get(_ACCUMULATION)) if isinstance(training, Mapping) else None
    model = tree.get(_SECTION)
    remat = model.get(_REMAT) if isinstance(model, Mapping) else None
    batch = as_count(tree.get(_BATCH)) or 0
    return (
        Setting(
            axes=tuple(AxisSize(name=n, ici=s) for n, s in zip(names, sizes, strict=True)),
            remat=None if remat is None else str(remat),
            accumulation=steps or 0,
            global_batch=max(batch, 0) * max(steps or 1, 1),
        ),
    )


def _meshes(tree: object, seen: set[int]) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    if not isinstance(tree, Mapping) or id(tree) in seen:
        return
    seen.add(id(tree))
    table = cast("Mapping[str, Any]", tree)
    mesh = table.get("mesh")
    if isinstance(mesh, Mapping) and {"shape", "axis_names"} <= mesh.keys():
        sizes = as_sizes(_value(mesh["shape"]), "mesh.shape")
        names = as_strings(_value(mesh["axis_names"]), "mesh.axis_names")
        if len(sizes) != len(names):
            raise UsageError(f"`mesh` has {len(sizes)} sizes for its {len(names)} axes")
        yield names, sizes
    for inner in table.values():
        yield from _meshes(inner, seen)


def _value(said: object) -> object:
    """Reads a tuple from a text, as both settings have it; a list is accepted, too."""
    if not isinstance(said, str):
        return said
    body = python_tree(f"({said}\n)").body
    return literal(body[0].value) if body and hasattr(body[0], "value") else None  # pyright: ignore


TUNIX = ExportFormat(
    name="tunix",
    title=_TITLE,
    seen_in=_SEEN_IN,
    axes=("fsdp", "tp"),
    names=(("fsdp", "fsdp"), ("tp", "tp")),
    other_axes=True,
    # `RematConfig`: 1 NONE, 2 BLOCK (the attention block), 3 DECODER (the whole layer).
    remat=(("none", "1"), ("block", "2"), ("full", "3")),
    remat_knob=_REMAT,
    batch_axes=("fsdp",),
    write=_write,
    read=_read,
)
