"""The meshes that MaxText and AXLearn publish for a model, put on one of our targets.

They are read from `benchmarks/data/expert_presets.json`. A published mesh that is open in one size
(`fsdp=-1`) is one for any number of devices; one that is written out for another number is none for
ours, and is left out, as is MaxText's for another length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.hardware import parse_target
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.strict_files import parse_tree
from automesh.reading import read_text
from benchmarks.presets.models import Model
from benchmarks.support.granules import split_over_granules
from benchmarks.support.paths import DATA

PRESETS = DATA / "expert_presets.json"
_MAXTEXT, _AXLEARN = ("maxtext", "maxtext-gpu"), "axlearn"
# Canonical names of axes in that file -> MaxText's.
_AXES = {
    "dp": "data",
    "fsdp": "fsdp",
    "fsdp2": "fsdp",  # MaxText's fsdp_transpose: as many bytes, along another dimension
    "ep": "expert",
    "cp": "context",
    "sp": "context",
    "tp": "tensor",
}
_ORDER = ("data", "fsdp", "expert", "context", "tensor")
# Our names, in which meshes are laid row by row -> MaxText's.
_OURS = {"dp": "data", "fsdp": "fsdp", "ep": "expert", "sp": "context", "tp": "tensor"}
_TRANSPOSED = "its fsdp_transpose counts as fsdp"

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A mesh that somebody publishes, on our target.

    Attributes:
      mesh: in MaxText's axes, as text.
      source: who publishes it, for what, and where.
      remark: what differs from what was published.
    """

    mesh: str
    source: str
    remark: str = ""


def published(model: Model, target: str, path: Path = PRESETS) -> tuple[Published, ...]:
    """The published meshes for a model on a target, each once; MaxText's own come first.

    Raises:
      UsageError: the file is not of the format.
    """
    listed = parse_tree(read_text(path), source=path)["presets"]
    found = dict[str, Published]()
    for one in _of_maxtext(listed, model, target):
        found.setdefault(one.mesh, one)
    for one in _of_axlearn(listed, model, target):
        same = found.get(one.mesh)
        both = one if same is None else replace(same, source=f"{same.source}; {one.source}")
        found[one.mesh] = both
    return tuple(found.values())


def _of_maxtext(listed: Iterable[dict], model: Model, target: str) -> Iterator[Published]:
    """Those for these devices first, then the others, then what MaxText takes if nobody says."""
    own = [
        one
        for one in listed
        if one["framework"] in _MAXTEXT
        and one["model"] == model.name
        and one.get("seq_len", model.length) == model.length
    ]
    own.sort(key=lambda one: target not in one.get("resolved", {}))
    defaults = [one for one in listed if one["model"] == "<any>" and one["id"] == "p310"]
    granules, each = _granules(target)
    for one in (*own, *defaults):
        ici, dcn = _named(one.get("ici") or {}), _named(one.get("dcn") or {})
        if ici is None or dcn is None:
            continue
        inside, between = _filled(ici, each), _filled(dcn, granules)
        if inside is None or between is None:
            continue
        axes = [
            MeshAxis(name=name, ici=inside.get(name, 1), dcn=between.get(name, 1))
            for name in _ORDER
        ]
        yield Published(mesh=format_mesh(axes), source=_source("MaxText", one), remark=_remark(one))


def _of_axlearn(listed: Iterable[dict], model: Model, target: str) -> Iterator[Published]:
    """The mesh of the first rule of AXLearn's whose pattern matches the target, else the default.

    AXLearn lays a mesh row by row over the devices where it does not split it itself.
    """
    rules = [
        one
        for one in listed
        if one["framework"] == _AXLEARN and model.axlearn and one["model"] == model.axlearn
    ]
    matching = [one for one in rules if _matches(one.get("selector", ""), target)]
    default = [one for one in rules if one.get("selector") == "<default>"]
    granules, each = _granules(target)
    for one in (*matching, *default)[:1]:
        mesh = _filled(one.get("mesh") or {}, granules * each)
        if mesh is None or not set(mesh) <= set(_OURS):
            return
        split = split_over_granules(mesh, each)
        if split is None:
            return
        by_name = {_OURS[axis.name]: axis for axis in split if axis.name in _OURS}
        axes = [
            MeshAxis(name=name, ici=by_name[name].ici, dcn=by_name[name].dcn) for name in _ORDER
        ]
        yield Published(
            mesh=format_mesh(axes),
            source=_source(f"AXLearn's {one['model']}", one),
            remark=_remark(one),
        )


def _matches(pattern: str, target: str) -> bool:
    return pattern != "<default>" and bool(re.fullmatch(pattern, target))


def _granules(target: str) -> tuple[int, int]:
    """Granules of a target, and devices in each."""
    absent = parse_target(target, {}).absent
    assert absent is not None, target
    return absent.fabric.num_granules, absent.fabric.granule_devices


def _named(sizes: Sizes) -> dict[str, int] | None:
    """Sizes under MaxText's names; None if an axis has none there that we search."""
    found = dict[str, int]()
    for name, size in sizes.items():
        if name not in _AXES:
            return None
        mine = _AXES[name]
        both = (found.get(mine, 1), size)
        found[mine] = -1 if -1 in both else math.prod(both)
    return found


def _filled(sizes: Sizes, count: int) -> dict[str, int] | None:
    """Sizes of `count` devices; None if they are written out for another number."""
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values():
        return dict(sizes) if known == count else None
    if count % known:
        return None
    return {name: count // known if size == -1 else size for name, size in sizes.items()}


def _source(who: str, one: dict) -> str:
    where = one.get("selector") or ", ".join(one.get("resolved", {})) or "any devices"
    rows = one.get("per_device_batch") or one.get("global_batch")
    batch = f", {rows} rows" if rows else ""
    batch += " of a device" if one.get("per_device_batch") else ""
    length = f" of {one['seq_len']} tokens" if one.get("seq_len") else ""
    return f"{who} for {where}{batch}{length} ({one['source']})"


def _remark(one: dict) -> str:
    remat = one.get("remat")
    said = [f"published with remat {remat}" if isinstance(remat, str) and len(remat) < 40
            else "published with a remat policy of its own"] if remat else []  # fmt: skip
    if "fsdp2" in (one.get("ici") or {}) or "fsdp2" in (one.get("dcn") or {}):
        said.append(_TRANSPOSED)
    return "; ".join(said)
