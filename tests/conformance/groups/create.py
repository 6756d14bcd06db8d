"""The groups of eformer's mesh creation: how a case becomes calls, and where automesh departs."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import automesh
from tests.conformance.outcomes import (
    Case,
    Departure,
    Verdict,
    Wanted,
    attempt,
    judge,
    uncovered,
    wanted,
)
from tests.support.fakes.worlds import (
    changing_axes,
    cpu_world,
    filled,
    granule_grid,
    ids,
    sliced,
    world,
)

_REFUSED = Wanted(raises="ValueError")


def host_mesh_shape(case: Case, _: Case) -> Verdict:
    """`calculate_host_mesh_shape`: exact where eformer's greedy split finds nothing."""
    shape, total = tuple(case["global_mesh_shape"]), case["total_devices"]
    with cpu_world():
        got = attempt(
            lambda: automesh.calculate_host_mesh_shape(
                shape, total_devices=total, num_processes=case["num_processes"]
            )
        )
    original = wanted(case["eformer"])
    if total == 0:
        return judge([original], got, Departure(name="no-devices-is-an-error", wanted=_REFUSED))
    exact = wanted(case.get("spectrax", case["eformer"]))
    return judge([original], got, Departure(name="exact-host-shape", wanted=exact))


def create_mesh(case: Case, _: Case) -> Verdict:
    """`create_mesh` on eight CPU devices of one process."""
    original = wanted(case["expect"])
    if "note" in case:
        return _create_mesh_note(case["note"], original)
    arguments = _tuples(case["kwargs"])
    with cpu_world():
        got = attempt(lambda: _facts(automesh.create_mesh(**arguments)))
    return judge([original], got, *_create_mesh_departures(arguments, original))


def _create_mesh_departures(arguments: Mapping[str, Any], original: Wanted) -> list[Departure]:
    names = arguments.get("axis_names", ("dp", "fsdp", "ep", "tp", "sp"))
    if len(set(names)) < len(names):
        return [Departure(name="repeated-axis-names", wanted=_REFUSED)]
    unasked = arguments.get("axis_types") is None and arguments.get("use_jax")
    if unasked and original.returns and "Explicit" in original.returns["axis_types"]:
        auto = {**original.returns, "axis_types": ["Auto"] * len(names)}
        return [Departure(name="auto-axis-types", wanted=Wanted(returns=auto))]
    return []


def _create_mesh_note(note: str, original: Wanted) -> Verdict:
    if "same arguments" not in note:
        return uncovered(f"the note `{note}` is not understood")

    def same() -> bool:
        arguments = {"axis_dims": (2, 4), "axis_names": ("a", "b")}
        return automesh.create_mesh(**arguments) is automesh.create_mesh(**arguments)

    with cpu_world():
        return judge([original], attempt(same))


def create_mesh_multi(case: Case, _: Case) -> Verdict:
    """`create_mesh` on stand-ins for the devices of several processes and slices."""
    asked = dict(case["args"])
    processes, each, slices = asked.pop("nproc"), asked.pop("per"), asked.pop("slices")
    environment = asked.pop("env", None)
    arguments = _tuples(asked)
    devices, granules = sliced(processes, each, slices), slices or processes
    with world(devices, processes=processes, environment=environment):
        got = attempt(lambda: _grid(automesh.create_mesh(**arguments)))
    original = wanted(case["expect"])
    name = "slices-from-the-environment" if environment else "exact-host-shape"
    dims, given = filled(arguments["axis_dims"], len(devices)), arguments.get("dcn_mesh_dims")
    if dims is None:
        departures = []
    elif given is not None:
        departures = _blocks_of(dims, filled(given, granules), "dcn-keeps-the-global-shape")
    else:
        # Where eformer's own way finds a mesh, it is automesh's mesh, too.
        departures = _blocks_of(dims, _dcn_of(dims, granules), name) if original.raises else []
    return judge([original], got, *departures)


def _blocks_of(dims: Sequence[int], dcn: Sequence[int] | None, name: str) -> list[Departure]:
    if dcn is None:
        return []
    if any(size % part for size, part in zip(dims, dcn, strict=True)):
        return [Departure(name=name, wanted=_REFUSED)]
    return [Departure(name=name, wanted=Wanted(returns=_blocks(dims, dcn)))]


def _dcn_of(dims: Sequence[int], granules: int) -> tuple[int, ...] | None:
    """By brute force: the granules on the leading axes as far as they go."""
    divisors = [[d for d in range(size, 0, -1) if size % d == 0] for size in dims]
    found = [choice for choice in _products(divisors) if math.prod(choice) == granules]
    return max(found, default=None)


def _products(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if not choices:
        return [()]
    return [(head, *tail) for head in choices[0] for tail in _products(choices[1:])]


def _blocks(dims: Sequence[int], dcn: Sequence[int]) -> dict[str, Any]:
    """A mesh in which granule g is the block at `unravel_index(g, dcn)`."""
    grid = np.zeros(dims, int)
    for place in np.ndindex(*dims):
        block = [at * part // size for at, part, size in zip(place, dcn, dims, strict=True)]
        grid[place] = np.ravel_multi_index(block, tuple(dcn))
    return _grid_facts(grid)


def parse_mesh_from_string(case: Case, _: Case) -> Verdict:
    """`parse_mesh_from_string` on eight CPU devices."""
    text, names = case["string"], case["names"]
    with cpu_world():
        got = attempt(lambda: _named_shape(automesh.parse_mesh_from_string(text, names)))
    departures = []
    pieces = [piece.split(":") for piece in text.split(",")]
    spaced = any(part != part.strip() for piece in pieces for part in piece)
    if spaced and all(len(piece) == 2 and piece[1].strip("- ").isdecimal() for piece in pieces):
        shape = filled([int(size) for _, size in pieces], 8)
        used = [name.strip() for name, _ in pieces]
        spaces = {"axis_names": used, "shape": list(shape or ())}
        departures.append(Departure(name="spaces-in-mesh-text", wanted=Wanted(returns=spaces)))
    return judge([wanted(case["expect"])], got, *departures)


def cpu_helpers(case: Case, _: Case) -> Verdict:
    """`create_cpu_mesh`, `force_cpu` and `cpu_context`."""
    original = wanted(case["expect"])
    call = case["call"]
    with cpu_world():
        if found := re.fullmatch(r"create_cpu_mesh\((.*)\)", call):
            arguments = ast.literal_eval(f"({found[1]},)" if found[1] else "()")
            return judge([original], attempt(lambda: _facts(automesh.create_cpu_mesh(*arguments))))
        if call.startswith("with force_cpu() as"):
            return judge([original], attempt(_forced))
        if call.startswith("with cpu_context() as"):
            # jax puts arrays that are made where a mesh is set on all devices of the mesh.
            by_set_mesh = {
                **original.returns,
                "legacy_env_mesh": {},
                "abstract_mesh_empty": False,
                "array_devices": 8,
            }
            departure = Departure(
                name="cpu-context-sets-the-mesh", wanted=Wanted(returns=by_set_mesh)
            )
            return judge([original], attempt(_in_context), departure)
    return uncovered(f"the call `{call}` is not understood")


def _forced() -> list[Any]:
    with automesh.force_cpu() as device:
        return [device.platform, device.id, _in_braces(jnp.ones(2).devices())]


def _in_braces(devices: Any) -> str:
    return "{" + ", ".join(f"CpuDevice(id={one.id})" for one in devices) + "}"


def _in_context() -> dict[str, Any]:
    with automesh.cpu_context() as mesh:
        return {
            "mesh": dict(mesh.shape),
            "legacy_env_mesh": dict(_legacy().shape),
            "abstract_mesh_empty": jax.sharding.get_abstract_mesh().empty,
            "array_devices": len(jnp.ones(2).devices()),
        }


def _legacy() -> Mesh:
    # What `with mesh:` sets; jax has no public name for it any more.
    return importlib.import_module("jax._src.mesh").thread_resources.env.physical_mesh


def _facts(mesh: Mesh) -> dict[str, Any]:
    return {
        "shape": dict(mesh.shape),
        "axis_types": [_type_name(one) for one in mesh.axis_types],
        "ids": ids(mesh.devices.ravel()),
    }


def _type_name(one: AxisType) -> str:
    return one.name


def _named_shape(mesh: Mesh) -> dict[str, Any]:
    return {"axis_names": list(mesh.axis_names), "shape": list(mesh.devices.shape)}


def _grid(mesh: Mesh) -> dict[str, Any]:
    return _grid_facts(granule_grid(mesh.devices))


def _grid_facts(grid: Any) -> dict[str, Any]:
    return {
        "shape": list(grid.shape),
        "granule_grid": grid.tolist(),
        "granule_axes": changing_axes(grid),
    }


def _tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
    }


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "calculate_host_mesh_shape": host_mesh_shape,
    "create_mesh": create_mesh,
    "create_mesh_multi": create_mesh_multi,
    "parse_mesh_from_string": parse_mesh_from_string,
    "cpu_helpers": cpu_helpers,
}
