"""The groups of Loadax's and AXLearn's meshes: how a case becomes calls, where automesh departs."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import automesh
from automesh import HybridMeshShape, MeshConfig, MeshRule
from automesh.mesh.infer import resolve_shape
from tests.conformance.outcomes import (
    Case,
    Departure,
    Outcome,
    Verdict,
    Wanted,
    attempt,
    judge,
    uncovered,
    wanted,
)
from tests.support.fakes.worlds import (
    changing_axes,
    cpus,
    filled,
    gpus,
    granule_grid,
    ids,
    is_blocks,
    sliced,
    tpus,
    world,
)

_REFUSED = Wanted(raises="ValueError")


def infer_mesh_shape(case: Case, _: Case) -> Verdict:
    """`infer_mesh_shape`: zero, other negatives and wrong products are refused."""
    sizes, total = case["mesh_shape"], case["num_devices"]
    given = tuple(sizes) if case["as_type"] == "tuple" else list(sizes)
    with world(cpus(8)):
        got = attempt(lambda: automesh.infer_mesh_shape(given, num_devices=total))
    departures = []
    if any(size == 0 or size < -1 for size in sizes):
        departures.append(Departure(name="sizes-are-positive", wanted=_REFUSED))
    elif total is not None and -1 not in sizes and math.prod(sizes) != total:
        departures.append(Departure(name="products-are-checked", wanted=_REFUSED))
    return judge([wanted(case["expect"])], got, *departures)


def hybrid_mesh_shape(case: Case, _: Case) -> Verdict:
    """`HybridMeshShape`: lengths, equality, hashing."""
    if "note" in case:
        return _hybrid_note(case["note"], wanted(case["expect"]))
    originals = [wanted(case["expect_axlearn"]), wanted(case["expect_loadax"])]
    ici, dcn = case["ici"], case["dcn"]
    got = attempt(lambda: len(HybridMeshShape(tuple(ici), tuple(dcn))))
    departures = []
    if any(list(part).count(-1) > 1 or any(n < -1 or n == 0 for n in part) for part in (ici, dcn)):
        departures.append(Departure(name="sizes-are-positive", wanted=_REFUSED))
    return judge(originals, got, *departures)


def _hybrid_note(note: str, original: Wanted) -> Verdict:
    one, other = HybridMeshShape((1, 8), (2, 1)), HybridMeshShape((1, 8), (2, 1))
    yes = Wanted(returns=True)
    if note.startswith("hash"):
        departure = Departure(name="shapes-can-be-hashed", wanted=yes)
        return judge([original], attempt(lambda: hash(one) == hash(other)), departure)
    if note.startswith("list vs tuple"):
        listed: Any = HybridMeshShape([1, 8], [2, 1])  # pyright: ignore[reportArgumentType]
        departure = Departure(name="shapes-can-be-hashed", wanted=yes)
        return judge([original], attempt(lambda: listed == one), departure)
    if note.startswith("equality"):
        return judge([original], attempt(lambda: one == other))
    return uncovered(f"the note `{note}` is not understood")


ENVIRONMENTS: Mapping[str, Callable[[], list[Any]]] = {
    "cpu1": lambda: cpus(1),
    "cpu8": lambda: cpus(8),
    "tpu-v4-4x4x1": lambda: tpus("TPU v4", (4, 4, 1)),
    "2x-tpu-v4-4x4x1": lambda: tpus("TPU v4", (4, 4, 1), slices=2),
    "2x-tpu-v5e-16x16": lambda: tpus("TPU v5 lite", (16, 16, 1), slices=2),
    "gpu-8x8-shuffled": lambda: gpus(8, 8, shuffled=True),
    "gpu-2x8": lambda: gpus(2, 8),
    "gpu-2x8-only-process-1": lambda: [one for one in gpus(2, 8) if one.process_index == 1],
}


def create_device_mesh(case: Case, _: Case) -> Verdict:
    """`MeshConfig.create_device_mesh(devices)`: shape, granules, order."""
    if case["env"] not in ENVIRONMENTS:
        return uncovered(f"the environment `{case['env']}` is not understood")
    devices = ENVIRONMENTS[case["env"]]()
    shape = case["mesh_shape"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = attempt(lambda: _config(_shape(shape)).create_device_mesh(devices).devices)
    original = case["expect"]
    if caught and len(original.get("granule_axes", ())) < 2:
        return Verdict(status="failed", detail=f"warned: {caught[0].message}")
    originals = [_laid_out(original)]
    if "loadax" in case:
        originals.append(_laid_out(case["loadax"]))
    asked = {key for one in (original, case.get("loadax", {})) for key in one}
    if "raises" in original:
        asked = {"device_ids"}
    if got.error is None:
        got = Outcome(returned=_layout_facts(got.returned, asked))
    return judge(originals, got, *_layout_departures(case, shape, devices))


def _laid_out(expect: Case) -> Wanted:
    return wanted(expect) if "raises" in expect else Wanted(returns=dict(expect))


def _layout_facts(devices: Any, asked: set[str]) -> dict[str, Any]:
    grid = granule_grid(devices)
    facts = {
        "shape": list(devices.shape),
        "granule_axes": changing_axes(grid),
        "granules_contiguous": is_blocks(grid),
        "device_ids": ids(devices),
    }
    return {key: value for key, value in facts.items() if key in asked}


def _layout_departures(case: Case, shape: Any, devices: Sequence[Any]) -> list[Departure]:
    departures = []
    if "loadax" in case:
        # The two originals differ: automesh follows AXLearn.
        departures.append(Departure(name="torus-layouts", wanted=_laid_out(case["expect"])))
    granules = {getattr(one, "slice_index", one.process_index) for one in devices}
    if max(granules) + 1 != len(granules) and case["expect"].get("raises"):
        full = _in_order(devices, shape)
        wish = Wanted(returns={"device_ids": full}) if full else _REFUSED
        departures.append(Departure(name="granules-are-distinct-keys", wanted=wish))
    return departures


def _in_order(devices: Sequence[Any], shape: Any) -> Any:
    """The ids of one granule in the order of the ids; None if the shape does not fit."""
    ici, dcn = (shape["ici"], shape["dcn"]) if isinstance(shape, Mapping) else (shape, (1,))
    sizes = filled(ici, len(devices))
    if sizes is None or math.prod(dcn) not in (1, -1):
        return None
    return np.array(sorted(one.id for one in devices)).reshape(sizes).tolist()


def mesh_rules(case: Case, group: Case) -> Verdict:
    """Rules of a `MeshConfig`: the first that matches the whole selector."""
    if "prefix_match(loadax)" in case:
        rules = [
            MeshRule(match=pattern, mesh_shape=HybridMeshShape((number,), (1,)))
            for number, pattern in enumerate(group["rule_letters"].values(), start=1)
        ]
        letters = [*group["rule_letters"], "NOMATCH"]
        config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("a",), mesh_rules=tuple(rules))
        got = attempt(lambda: letters[_size(config.select(case["selector"])) - 1])
        fullmatch = Wanted(returns=case["fullmatch"])
        return judge(
            [fullmatch, Wanted(returns=case["prefix_match(loadax)"])],
            got,
            Departure(name="rules-match-the-whole-selector", wanted=fullmatch),
        )
    if isinstance(case["rules"], str):
        return _modifiers(case)
    return _plain_rules(case)


def _size(config: MeshConfig) -> int:
    """The size of the only axis; 0 for the default of -1, so that the last letter is meant."""
    shape = config.mesh_shape
    return shape.ici_mesh_shape[0] if isinstance(shape, HybridMeshShape) else 0


def _plain_rules(case: Case) -> Verdict:
    pairs = [(pattern, shape and _shape(shape)) for pattern, shape in case["rules"] or ()]
    lengths = {len(shape) for _, shape in pairs if shape} or {4}
    default = (-1,) + (1,) * (max(lengths) - 1)
    names = tuple("abcdefgh"[: len(default)])
    config: Any = MeshConfig  # Pairs of a pattern and a shape are taken, as the seeds do.
    got = attempt(
        lambda: _sizes(
            config(mesh_shape=default, mesh_axis_names=names, mesh_rules=pairs or None)
            .select(case["selector"])
            .mesh_shape
        )
    )
    expect = list(default) if case["expect"] == "unchanged" else case["expect"]
    departures = []
    if expect is None:
        same = Wanted(returns=list(default))
        departures.append(Departure(name="rule-without-shape", wanted=same))
    return judge([Wanted(returns=expect)], got, *departures)


def _modifiers(case: Case) -> Verdict:
    """A rule's value may change more than the mesh: in automesh these are knobs of `build`."""
    found = re.fullmatch(
        r"\[\('(?P<match>[^']+)', Chain\(MeshShape\((?P<shape>[\d, ]+)\), "
        r"RematSpec\(\{'(?P<path>[\w.]+)': (?P<policy>\w+)\}\), GradAccum\((?P<steps>\d+)\)\)\)\]",
        case["rules"],
    )
    if found is None:
        return uncovered(
            "modifies a config tree by module path; automesh's rules carry knobs, "
            "which `build` takes as keyword arguments"
        )
    knobs = {"grad_accum": int(found["steps"]), f"remat.{found['path']}": found["policy"]}
    sizes = tuple(map(int, found["shape"].split(",")))
    rule = MeshRule(
        match=found["match"],
        mesh_shape=sizes,
        knobs=knobs,  # pyright: ignore[reportArgumentType]
    )
    config = MeshConfig(
        mesh_shape=(-1,) + (1,) * (len(sizes) - 1),
        mesh_axis_names=tuple("abcdefgh"[: len(sizes)]),
        mesh_rules=(rule,),
    )

    def selected() -> dict[str, Any]:
        chosen = config.select(case["selector"])
        return {"mesh_shape": _sizes(chosen.mesh_shape), **chosen.knobs}

    return judge(
        [Wanted(raises="modifiers of a config tree")],
        attempt(selected),
        Departure(name="rules-carry-knobs", wanted=Wanted(returns=case["expect"])),
    )


def presets(case: Case, _: Case) -> Verdict:
    """`make_ddp_mesh_config` and `make_fsdp_mesh_config`."""
    make: Any = {"ddp": automesh.make_ddp_mesh_config, "fsdp": automesh.make_fsdp_mesh_config}[
        case["preset"]
    ]
    if "mesh_rules" in case:
        return _preset_rules(case, make)
    nodes, each, names = case["nodes"], case["devices_per_node"], tuple(case["mesh_axis_names"])
    with world(gpus(nodes, each), processes=nodes):
        got = attempt(lambda: _preset_facts(make(mesh_axis_names=names)))
    departures = []
    if case["preset"] == "ddp" and len(names) > 1 and "returns" in case["expect"]:
        ones = [1] * (len(names) - 1)
        padded = {"ici": [each, *ones], "dcn": [nodes, *ones]}
        departures.append(
            Departure(
                name="ddp-pads-with-ones",
                wanted=Wanted(returns={**case["expect"]["returns"], "mesh_shape": padded}),
            )
        )
    return judge([wanted(case["expect"])], got, *departures)


def _preset_facts(config: MeshConfig) -> dict[str, Any]:
    batch = config.batch_axis_names
    return {
        "mesh_shape": _sizes(config.mesh_shape),
        "axis_names": list(config.mesh_axis_names),
        "batch_axis_names": batch[0] if len(batch) == 1 else list(batch),
    }


def _preset_rules(case: Case, make: Any) -> Verdict:
    pairs = [(match, shape and _shape(shape)) for match, shape in case["mesh_rules"]]
    selector, original = case["mesh_selector"], wanted(case["expect_mesh_shape"])
    shortest = 1 if case["preset"] == "ddp" else 2
    count = max([len(shape) for _, shape in pairs if shape] or [shortest])
    names = ("data", "model", "expert", "sequence")[:count]
    with world(gpus(1, 8)):
        got = attempt(
            lambda: _sizes(
                make(mesh_axis_names=names, mesh_rules=pairs, mesh_selector=selector).mesh_shape
            )
        )
    ones = [1] * (count - 1)
    found = {
        "ddp": {"ici": [8, *ones], "dcn": [1, *ones]},
        "fsdp": {"ici": [*ones, 8], "dcn": [1, *ones]},
    }
    automatic = Wanted(returns=found[case["preset"]])
    whole = [match for match, _ in pairs if re.fullmatch(match, selector or "")]
    begins = [match for match, _ in pairs if re.match(match, selector or "")]
    departures = []
    if begins[:1] != whole[:1]:
        wish = Wanted(returns=_sizes(dict(pairs)[whole[0]])) if whole else automatic
        departures.append(Departure(name="rules-match-the-whole-selector", wanted=wish))
    elif not begins and case["preset"] == "ddp" and count > 1:
        departures.append(Departure(name="ddp-pads-with-ones", wanted=automatic))
    return judge([original], got, *departures)


def aot_reshape_devices(case: Case, _: Case) -> Verdict:
    """The mesh for devices that are not here is the one of run time."""
    if isinstance(case["mesh_shape"], str):
        return judge([wanted(case["expect"])], attempt(lambda: _config(case["mesh_shape"])))
    each, slices = case["devices_per_slice"], case["num_slices"]
    devices = sliced(slices, each, slices if slices > 1 else 0)
    text = case["mesh_shape"]
    mesh = attempt(lambda: _config(_shape(text)).create_device_mesh(devices).devices)
    if mesh.error is not None:
        return judge([wanted(case["expect"])], mesh)
    grid = granule_grid(mesh.returned)
    want = case["expect"]
    facts = {
        "mesh_shape": _resolved(_shape(text), devices, slices),
        "devices_shape": list(grid.shape),
        "blocks": is_blocks(grid),
    }
    # AXLearn's plain reshape gives the same shapes; blocks of slices are what it does not promise.
    return judge([Wanted(returns={**want, "blocks": True})], Outcome(returned=facts))


def _resolved(shape: Any, devices: Sequence[Any], slices: int) -> Any:
    resolved = resolve_shape(shape, num_devices=len(devices), num_granules=slices)
    if isinstance(shape, HybridMeshShape):
        return _sizes(resolved)
    parts = zip(resolved.ici_mesh_shape, resolved.dcn_mesh_shape, strict=True)
    return [ici * dcn for ici, dcn in parts]


def _shape(text: Any) -> Any:
    if isinstance(text, Mapping):
        return HybridMeshShape(tuple(text["ici"]), tuple(text["dcn"]))
    return tuple(text)


def _sizes(shape: Any) -> Any:
    if isinstance(shape, HybridMeshShape):
        return {"ici": list(shape.ici_mesh_shape), "dcn": list(shape.dcn_mesh_shape)}
    return list(shape)


def _config(shape: Any) -> MeshConfig:
    return MeshConfig(mesh_shape=shape, mesh_axis_names=tuple("abcdefgh"[: len(shape)]))


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "infer_mesh_shape": infer_mesh_shape,
    "hybrid_mesh_shape": hybrid_mesh_shape,
    "create_device_mesh": create_device_mesh,
    "mesh_rules": mesh_rules,
    "loadax_presets": presets,
    "axlearn_aot_reshape_devices": aot_reshape_devices,
}
