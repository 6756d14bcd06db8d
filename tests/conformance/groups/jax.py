"""The groups of jax's own building blocks: automesh's layouts are to be jax's."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

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
    FakeDevice,
    changing_axes,
    cpu_world,
    granule_grid,
    ids,
    tpus,
    world,
)

_REFUSED = Wanted(raises="ValueError")


def device_ids(case: Case, _: Case) -> Verdict:
    """The order of the devices of small slices, from `MeshConfig.create_device_mesh`."""
    devices = _in_tiles(case["kind"], case["physical"], case["cores_per_chip"])
    got = attempt(lambda: ids(_config(case["mesh_shape"]).create_device_mesh(devices).devices))
    return judge([wanted(case["expect"])], got)


def _in_tiles(kind: str, physical: Sequence[int], cores: int) -> list[Any]:
    """Chips with x the fastest coordinate, in the order in which hosts of 2 x 2 chips list them."""
    x_size, y_size, z_size = physical
    chips = itertools.product(range(z_size), range(y_size), range(x_size))
    devices = [
        FakeDevice(
            id=core + cores * (x + x_size * (y + y_size * z)),
            platform="tpu",
            device_kind=kind,
            process_index=x // 2 + (x_size + 1) // 2 * (y // 2 + (y_size + 1) // 2 * z),
            coords=(x, y, z),
            core_on_chip=core,
        )
        for z, y, x in chips
        for core in range(cores)
    ]
    return sorted(devices, key=lambda one: (one.process_index, one.id))


def torus_assignment(case: Case, _: Case) -> Verdict:
    """Which torus dimensions each mesh axis lies along, read off the mesh of `create_mesh`."""
    original = wanted(case["expect"])
    devices = tpus("TPU v4", case["physical"])
    got = attempt(lambda: _assignment(case, devices))
    departures = []
    if original.raises == "NotImplementedError":
        departures.append(Departure(name="layouts-that-jax-lacks", wanted=_REFUSED))
    return judge([original], got, *departures)


def _assignment(case: Case, devices: Sequence[Any]) -> list[list[int]]:
    logical = tuple(case["logical"])
    with world(devices):
        mesh = automesh.create_mesh(
            logical, _names(logical), allow_split_physical_axes=case["allow_split_physical_axes"]
        )
    coords = np.array([one.coords for one in mesh.devices.ravel()]).reshape(*logical, -1)
    matrix = [
        [len(np.unique(_line(coords[..., dimension], axis))) for axis in range(len(logical))]
        for dimension in range(coords.shape[-1])
    ]
    assert [math.prod(row) for row in matrix] == list(case["physical"])
    return matrix


def _line(coordinates: Any, axis: int) -> Any:
    """The values along one axis, from the first place of all others."""
    return coordinates[tuple(slice(None) if at == axis else 0 for at in range(coordinates.ndim))]


def hybrid(case: Case, _: Case) -> Verdict:
    """Granules in blocks, sorted by key or in the order of their first device."""
    found = re.fullmatch(r"(\d+) slices of v4 (\d+)x(\d+)x(\d+)", case["devices"])
    if found is None:
        return uncovered(f"the devices `{case['devices']}` are not understood")
    slices, *shape = map(int, found.groups())
    devices = sorted(tpus("TPU v4", shape, slices=slices), key=lambda one: one.id)
    given = {
        "sorted": (devices, True),
        "reversed_input_sorted": (devices[::-1], True),
        "reversed_input_unsorted": (devices[::-1], False),
    }
    originals = {name: wanted(case[name]).returns for name in given if name in case}
    got = attempt(
        lambda: {name: _hybrid_facts(case, *given[name]) for name in originals},
    )
    return judge([Wanted(returns=originals)], got)


def _hybrid_facts(case: Case, devices: Sequence[Any], in_order: bool) -> dict[str, Any]:
    dims = tuple(a * b for a, b in zip(case["ici"], case["dcn"], strict=True))
    with world(devices, processes=len({one.process_index for one in devices})):
        mesh = automesh.create_mesh(
            dims,
            _names(dims),
            dcn_mesh_dims=tuple(case["dcn"]),
            should_sort_granules_by_key=in_order,
        )
    grid = granule_grid(mesh.devices)
    return {
        "shape": list(grid.shape),
        "granule_axis": changing_axes(grid),
        "first_granule": int(grid.ravel()[0]),
    }


def errors(case: Case, _: Case) -> Verdict:
    """What jax refuses: automesh refuses it in its own words, or says why it does not."""
    original, name = wanted(case["expect"]), case["case"]
    if name not in _ERRORS:
        return uncovered(f"the case `{name}` is not understood")
    call, foreign, departures = _ERRORS[name]
    with cpu_world():
        got = attempt(call)
    return judge([original], got, *departures, foreign=foreign)


def _config(shape: Any) -> automesh.MeshConfig:
    return automesh.MeshConfig(mesh_shape=tuple(shape), mesh_axis_names=_names(shape))


def _shape_of(shape: Any) -> list[int]:
    return list(_config(shape).create_device_mesh().devices.shape)


def _unsplit() -> Any:
    with world(tpus("TPU v4", (4, 4, 4))):
        return automesh.create_mesh((2, 32), ("a", "b"), allow_split_physical_axes=False)


def _with_a_hole() -> Any:
    chips = [one for one in tpus("TPU v4", (2, 2, 2)) if one.coords != (0, 0, 0)]
    return _config((7,)).create_device_mesh(chips)


def _of_two_ranks() -> Any:
    return automesh.HybridMeshShape((1, 64), (2,))


def _two_granules_of_one_process() -> Any:
    shape = automesh.HybridMeshShape((1, 4), (2, 1))
    return automesh.MeshConfig(mesh_shape=shape, mesh_axis_names=("a", "b")).create_device_mesh()


def _contiguous() -> Any:
    chips = tpus("TPU v4", (4, 4, 8))
    return mesh_utils.create_device_mesh((16, 8), chips, contiguous_submeshes=True)


def _types(mesh: Mesh) -> list[str]:
    return [str(one) for one in mesh.axis_types]


_Call = tuple[Callable[[], Any], bool, Sequence[Departure]]
_ERRORS: Mapping[str, _Call] = {
    "mesh_shape ((4,),4)": (lambda: _shape_of(((4,), 4)), False, ()),
    "(3,) on 8 devices": (lambda: _shape_of((3,)), False, ()),
    "(-1,2) on 8 devices: -1 not supported by JAX": (
        lambda: _shape_of((-1, 2)),
        False,
        (Departure(name="inferred-sizes", wanted=Wanted(returns=[4, 2])),),
    ),
    "v4 4x4x4 logical (2,32) no split": (
        _unsplit,
        False,
        (Departure(name="layouts-that-jax-lacks", wanted=_REFUSED),),
    ),
    "hybrid, cpu without slice_index": (_two_granules_of_one_process, False, ()),
    "hybrid, different rank of shapes": (
        _of_two_ranks,
        False,
        (Departure(name="equal-ranks", wanted=_REFUSED),),
    ),
    "hole in the cuboid": (
        _with_a_hole,
        False,
        (Departure(name="layouts-that-jax-lacks", wanted=_REFUSED),),
    ),
    # jax's own: they tell when a new release of it changes what automesh rests on.
    "contiguous_submeshes on 4x4x8": (_contiguous, True, ()),
    "make_mesh (16,) on 8": (
        lambda: jax.make_mesh((16,), ("a",), devices=jax.devices()),
        True,
        (),
    ),
    "make_mesh default axis types": (
        lambda: _types(jax.make_mesh((8,), ("a",), devices=jax.devices())),
        True,
        (),
    ),
    "Mesh default axis types": (
        lambda: _types(Mesh(np.array(jax.devices()), ("a",))),
        True,
        (),
    ),
}


def _names(shape: Sequence[Any]) -> tuple[str, ...]:
    return tuple("abcdefgh"[: len(shape)])


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "jax_create_device_mesh_ids": device_ids,
    "jax_torus_assignment": torus_assignment,
    "jax_create_device_mesh_errors": errors,
    "jax_hybrid": hybrid,
}
