"""Public expert presets, read from a file and put in terms of the shipped examples.

What the examples can represent becomes an `Expert`: a step, a target and a mesh in our axes. All
else becomes a `Skipped` with its reason. `benchmarks/data/expert_presets.json` shows the format.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from automesh.errors import UsageError
from automesh.hardware import Absent, parse_target
from automesh.mesh.axes import DEFAULT_AXES, MeshAxis, format_mesh
from automesh.mesh.strict_files import parse_tree
from automesh.reading import read_text
from benchmarks.support.granules import split_over_granules
from benchmarks.support.models import (
    DENSE,
    LONG,
    MOE,
    SPACES,
    Model,
    Unlike,
    arguments_of,
    chunk_of,
    model_called,
)
from benchmarks.support.spaces import with_usual_axes

# Names of mesh axes in AXLearn, MaxText, Levanter and EasyDeL -> ours. The second fsdp axis of
# MaxText splits another dimension of the weights: as many bytes as more of the first.
AXES = {
    "dp": "dp",
    "data": "dp",
    "replica": "dp",
    "fsdp": "fsdp",
    "fsdp2": "fsdp",
    "fsdp_transpose": "fsdp",
    "ep": "ep",
    "expert": "ep",
    "tp": "tp",
    "model": "tp",
    "tensor": "tp",
    "sp": "sp",
    "seq": "sp",
    "sequence": "sp",
    "cp": "sp",
    "context": "sp",
}
_CONTEXT = ("cp", "context")
_PIPELINE = ("pp", "pipeline", "stage")
_SHAPE = re.compile(r"tpu-(?P<kind>[a-z0-9]+)\((?P<dims>[0-9]+(x[0-9]+)+)\)")
_KIND_IN_NAME = re.compile(r"\([A-Za-z0-9-]+\)")

Mesh = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A preset on concrete devices.

    Attributes:
      mesh: one mesh over all devices, where the framework does not split it into ICI and DCN.
    """

    hardware: dict[str, Any] = field(default_factory=dict[str, Any])
    ici: dict[str, int] | None = None
    dcn: dict[str, int] | None = None
    mesh: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A preset as published.

    Attributes:
      resolved: selector -> the mesh on these devices.
    """

    id: str
    framework: str
    model: str
    selector: str = ""
    global_batch: int | None = None
    per_device_batch: float | None = None
    seq_len: int | None = None
    grad_accum: int | None = None
    remat: Any = None
    resolved: dict[str, Point] = field(default_factory=dict[str, Point])
    other: dict[str, Any] = field(default_factory=dict[str, Any])
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A preset that an example can represent.

    Attributes:
      selector: of the devices, as published.
      target: the same devices, as we call them.
      script: of the example, below the root of the repository.
      mesh: the expert's, in our axes.
      remarks: what differs from the original, one phrase each.
    """

    id: str
    model: str
    framework: str
    selector: str
    target: str
    num_devices: int
    script: str
    argv: tuple[str, ...]
    mesh: str
    remat: str
    microbatches: int
    remarks: tuple[str, ...]
    source: str

    @property
    def baseline(self) -> str:
        """The expert's plan, as a search takes it."""
        return f"{self.mesh} remat={self.remat} microbatches={self.microbatches}"

    @property
    def space(self) -> str:
        """The example's shipped space at the expert's knobs, as TOML."""
        shipped = read_text(SPACES[self.script]).partition("[knobs]")[0]
        knobs = f'[knobs]\nremat = ["{self.remat}"]\nmicrobatches = [{self.microbatches}]\n'
        return with_usual_axes(shipped + knobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A preset that no example can represent, and why."""

    id: str
    model: str
    selector: str
    reason: str


def read_presets(path: Path) -> tuple[Preset, ...]:
    """Reads the presets of a file.

    Raises:
      UsageError: it is not of the format.
    """
    tree = parse_tree(read_text(path), source=path)
    listed = tree.get("presets")
    if not isinstance(listed, list):
        raise UsageError(f"`{path}` has no list `presets`", hint="see benchmarks/data")
    try:
        return tuple(TypeAdapter(list[Preset]).validate_json(json.dumps(listed)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].lower()
        raise UsageError(f"`{path}`: `presets.{where}`: {said}") from None


def sort_out(presets: Iterable[Preset]) -> tuple[tuple[Expert, ...], tuple[Skipped, ...]]:
    """Those that can be represented, the cheapest to compile first, and the others."""
    experts: list[Expert] = []
    skipped: list[Skipped] = []
    for preset in presets:
        one = expert_of(preset)
        if isinstance(one, Expert):
            experts.append(one)
        else:
            skipped.append(one)
    experts.sort(key=lambda one: (one.target.startswith("gpu"), one.num_devices, one.id))
    return tuple(experts), tuple(skipped)


def expert_of(preset: Preset) -> Expert | Skipped:
    """A preset on the smallest of its devices, in our terms."""
    try:
        return _expert_of(preset)
    except Unlike as reason:
        return Skipped(
            id=preset.id, model=preset.model, selector=preset.selector, reason=str(reason)
        )


def _expert_of(preset: Preset) -> Expert:
    if not preset.resolved:
        raise Unlike("it names no devices of a known number")
    model = model_called(preset.model)
    selector, absent, target = _smallest(preset.resolved)
    point = preset.resolved[selector]
    mesh = format_mesh(mesh_of(point, absent))
    rows = preset.global_batch or round((preset.per_device_batch or 0) * absent.num_devices)
    if not rows or not preset.seq_len:
        raise Unlike("its batch or its sequence length is not on record")
    remat, remark = remat_of(preset.remat)
    microbatches = preset.grad_accum or 1
    each = rows * preset.seq_len / absent.num_devices / microbatches
    sizes = {"rows": rows, "length": preset.seq_len, "chunk": chunk_of(model, each)}
    remarks = [*model.remarks, remark, _of_precision(preset), _of_axes(point)]
    return Expert(
        id=preset.id,
        model=preset.model,
        framework=preset.framework,
        selector=selector,
        target=target,
        num_devices=absent.num_devices,
        script=_script_of(model, point),
        argv=arguments_of(model, sizes),
        mesh=mesh,
        remat=remat,
        microbatches=microbatches,
        remarks=tuple(remark for remark in remarks if remark),
        source=preset.source,
    )


def target_called(selector: str) -> str:
    """The name by which we know a selector's devices; empty if they are none that we know.

    >>> target_called("tpu-7x(4x8x8)"), target_called("gpu-a3-ultragpu-8g(H200)-256")
    ('7x:4x8x8', 'gpu-a3-ultragpu-8g-256')
    """
    shape = _SHAPE.fullmatch(selector)
    name = f"{shape['kind']}:{shape['dims']}" if shape else _KIND_IN_NAME.sub("", selector)
    return name if name.startswith(("tpu-", "gpu-")) or shape else ""


def remat_of(remat: object) -> tuple[str, str]:
    """The value of our knob that comes nearest and keeps no more, and what differs; "" if nothing.

    >>> remat_of("minimal")
    ('dots', '')
    """
    if isinstance(remat, str) and remat.lower() in ("full", "none", "minimal", "minimal_flash"):
        return {"full": "full", "none": "none"}.get(remat.lower(), "dots"), ""
    if isinstance(remat, list) and remat:
        policy = remat[0].get("policy") if isinstance(remat[0], dict) else None
        if policy == "checkpoint_policies.dots_saveable":
            return "dots", ""
    if remat is None:
        return "full", "remat is not on record, and full here"
    return "full", "some activations are kept or offloaded there, and recomputed here"


def mesh_of(point: Point, absent: Absent) -> tuple[MeshAxis, ...]:
    """The mesh in our axes.

    Raises:
      Unlike: it has axes that we do not have, or is not of these devices.
    """
    ici, dcn, flat = (_in_our_axes(one or {}) for one in (point.ici, point.dcn, point.mesh))
    granules = absent.fabric.num_granules
    if point.mesh is not None:
        axes = split_over_granules(flat, absent.num_devices // granules)
        if axes is None:
            raise Unlike("the rows of its mesh and the machines do not end at the same devices")
    else:
        axes = tuple(
            MeshAxis(name=name, ici=ici.get(name, 1), dcn=dcn.get(name, 1)) for name in DEFAULT_AXES
        )
    inside = math.prod(axis.ici for axis in axes)
    between = math.prod(axis.dcn for axis in axes)
    if (inside * between, between) != (absent.num_devices, granules):
        raise Unlike(
            f"its mesh {format_mesh(axes)} is not one of {absent.num_devices} devices in "
            f"{granules} granules"
        )
    return axes


def _in_our_axes(mesh: Mesh) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in mesh.items():
        if size == 1:
            continue
        if name in _PIPELINE:
            raise Unlike("pipelines are not searched yet")
        if name not in AXES or size < 1:
            raise Unlike(f"its axis `{name}` of size {size} is none of ours")
        found[AXES[name]] = found.get(AXES[name], 1) * size
    return found


def _smallest(resolved: Mapping[str, Point]) -> tuple[str, Absent, str]:
    """The fewest devices among those that we know: their selector, facts and our name."""
    known: list[tuple[int, str, Absent, str]] = []
    reasons: list[str] = []
    for selector in resolved:
        target = target_called(selector)
        try:
            absent = parse_target(target, os.environ).absent if target else None
        except UsageError as error:
            reasons.append(error.message)
            continue
        if absent is None:
            reasons.append(f"`{selector}` is neither TPU nor GPU")
        else:
            known.append((absent.num_devices, selector, absent, target))
    if not known:
        raise Unlike(reasons[0])
    _, selector, absent, target = min(known, key=lambda one: one[:2])
    return selector, absent, target


def _script_of(model: Model, point: Point) -> str:
    used = {name for one in (point.ici, point.dcn, point.mesh) for name in one or {}}
    is_long = any(name in used for name in _CONTEXT)
    if is_long and model.script != DENSE:
        raise Unlike("it splits sequences, and the example with experts does not")
    if model.script != MOE and any(AXES.get(name) == "ep" for name in used):
        raise Unlike("it splits experts, and its model is represented without")
    return LONG if is_long else model.script


def _of_precision(preset: Preset) -> str:
    quantized = str(preset.other.get("quantization") or "")
    return f"{quantized} products there, bfloat16 here" if quantized else ""


def _of_axes(point: Point) -> str:
    used: Sequence[str] = [name for one in (point.ici, point.dcn) for name in one or {}]
    return "fsdp_transpose is taken as fsdp" if "fsdp2" in used else ""
