"""Lowers pipelines for absent devices: all stages are lowered for the submesh of the first rank
(jax).

The reason is that libtpu only compiles for the first devices of a topology.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from automesh.hardware.absent import AbsentDevices
from automesh.outcomes import Failed
from automesh.program.absent.client import devices_of
from automesh.program.refused import StepRefused
from automesh.program.script.build import Built
from automesh_pipeline.runtime.training import TrainStep
from automesh_pipeline.search.lower import StagedProgram, lower_pipeline


def lower_for_absent(
    built: Built, step: TrainStep, one: AbsentDevices
) -> tuple[StagedProgram, AbsentDevices]:
    """Lowers each stage for the submesh of the first rank, or for a submesh with the same links.

    Args:
      one: all devices of the pipeline.

    Returns:
      The lowered pipeline, and the devices that it was lowered for: as many slices as a rank spans.

    Raises:
      UsageError: see `lower_pipeline`.
      StepRefused: the submeshes differ in shape, or are no parts of the mesh along one of its axes;
        or as for `devices_of`.
    """
    submeshes = step.mesh.submeshes
    if step.mesh.axis not in built.mesh.axis_names:
        reason = "a pipeline whose submeshes are given one by one is not compiled for devices that"
        raise StepRefused(Failed(stage="build", reason=f"{reason} are not here"))
    if len({submesh.abstract_mesh for submesh in submeshes}) > 1:
        reason = "submeshes of different shapes are not compiled for devices that are not here"
        raise StepRefused(Failed(stage="build", reason=reason))
    first = submeshes[0]
    chosen: list[Any] = list(first.devices.flat)
    part = first_granules(one, len({_granule(device) for device in chosen}))
    if part != one:
        chosen = moved_to(devices_of(part), chosen)
    moved: Any = np.array(first_devices(chosen, devices_of(part)))
    fake_mesh = Mesh(
        moved.reshape(first.devices.shape), first.axis_names, axis_types=first.axis_types
    )
    return lower_pipeline(built, step, on=lambda _: fake_mesh), part


def first_granules(one: AbsentDevices, count: int) -> AbsentDevices:
    """Reduces a description of several TPU slices to the first `count` of them. GPUs are returned
    unchanged: their programs do not depend on the node.

    >>> slices = AbsentDevices(platform="tpu", device_kind="TPU v5e", num_devices=64,
    ...                        num_granules=4, num_hosts=16, topology="v5e:4x4")
    >>> (first_granules(slices, 2).num_devices, first_granules(slices, 2).num_hosts)
    (32, 8)
    """
    if one.platform != "tpu" or count == one.num_granules:
        return one
    return replace(
        one,
        num_granules=count,
        num_devices=one.num_devices * count // one.num_granules,
        num_hosts=one.num_hosts * count // one.num_granules,
    )


def moved_to(devices: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """Returns the devices, of a description with fewer slices, that have the same positions as the
    chosen ones, slice by slice."""
    granules = sorted({_granule(device) for device in chosen})
    places = {_place(device, device.coords): device for device in devices}
    return [
        places[granules.index(_granule(device)), *_place(device, device.coords)[1:]]
        for device in chosen
    ]


def first_devices(chosen: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """Turns chosen devices of a torus so that they are the first ones of their granules.

    A part of a torus has the same links in whichever direction it lies.

    Args:
      devices: all devices of the torus.

    Returns:
      The turned devices in the same order; the chosen ones themselves if no turn makes them the
      first ones, or if there is no torus.
    """
    if chosen[0].platform != "tpu":
        return list(chosen)
    places = {_place(device, device.coords): device for device in devices}
    wanted = _first_of_granules(devices, chosen)
    corner = np.min([device.coords for device in chosen], axis=0)
    for order in itertools.permutations(range(len(corner))):
        turned = [(np.array(one.coords) - corner)[list(order)] for one in chosen]
        moved = [
            places.get(_place(one, place.tolist()))
            for one, place in zip(chosen, turned, strict=True)
        ]
        if {device.id for device in moved if device is not None} == wanted:
            return moved
    return list(chosen)


def _granule(device: Any) -> int:
    return getattr(device, "slice_index", 0)


def _place(device: Any, coords: Sequence[int]) -> tuple[int, ...]:
    return (_granule(device), *coords, getattr(device, "core_on_chip", 0))


def _first_of_granules(devices: Sequence[Any], chosen: Sequence[Any]) -> set[int]:
    """Returns the ids of the first devices of each granule, as many as are chosen there."""
    found: set[int] = set()
    for granule in {_granule(device) for device in chosen}:
        ids = sorted(device.id for device in devices if _granule(device) == granule)
        found.update(ids[: sum(_granule(one) == granule for one in chosen)])
    return found
