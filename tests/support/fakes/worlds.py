"""Devices that are not here, and jax's public queries answering for them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDevice:
    """What mesh_utils, Mesh and automesh look at."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSliced(FakeDevice):
    """A device that knows its slice."""

    slice_index: int = 0


def tpus(
    kind: str, shape: Sequence[int], *, slices: int = 0, cores: int = 1, per_host: int = 4
) -> list[Any]:
    """TPU chips in a box, row-major (the first coordinate slowest); slices alternate in the list.

    Args:
      shape: chips along x, y and z.
      slices: 0 for one slice whose devices have no `slice_index`.
    """
    cells = list(itertools.product(*map(range, shape)))
    devices: list[Any] = []
    for number, coords in enumerate(cells):
        for core in range(cores):
            for one in range(max(slices, 1)):
                facts: dict[str, Any] = {
                    "id": len(cells) * cores * one + number * cores + core,
                    "platform": "tpu",
                    "device_kind": kind,
                    "process_index": (len(cells) * one + number) // per_host,
                    "coords": coords,
                    "core_on_chip": core,
                }
                devices.append(
                    FakeSliced(**facts, slice_index=one) if slices else FakeDevice(**facts)
                )
    return devices


def gpus(nodes: int, each: int, *, shuffled: bool = False) -> list[Any]:
    """GPUs of nodes, one process a node; shuffled: the first of every node, then the second..."""
    devices = [
        FakeDevice(
            id=each * node + index,
            platform="gpu",
            device_kind="NVIDIA H100 80GB HBM3",
            process_index=node,
        )
        for node in range(nodes)
        for index in range(each)
    ]
    return sorted(devices, key=lambda one: (one.id % each, one.id)) if shuffled else devices


def sliced(processes: int, each: int, slices: int) -> list[Any]:
    """The TPU slices of a job of some processes, or, without slices, its GPUs."""
    if not slices:
        return gpus(processes, each)
    per_slice = processes * each // slices
    devices = tpus("TPU v4", (per_slice, 1, 1), slices=slices, per_host=each)
    return sorted(devices, key=lambda one: one.id)


def cpus(count: int) -> list[Any]:
    """The first of the virtual CPU devices, which are real to jax."""
    found = jax.devices("cpu")
    assert len(found) >= count, f"needs JAX_NUM_CPU_DEVICES={count} or more"
    return found[:count]


@contextmanager
def world(
    devices: Sequence[Any], *, processes: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """jax's public queries answer that there are exactly these devices; this is process 0."""
    local = [one for one in devices if processes == 1 or one.process_index == 0]
    ask, platforms = jax.devices, {None, *(one.platform for one in devices)}
    answers = {
        "devices": lambda backend=None: list(devices) if backend in platforms else ask(backend),
        "local_devices": lambda process_index=None, backend=None, host_id=None: list(local),
        "device_count": lambda backend=None: len(devices),
        "local_device_count": lambda backend=None: len(local),
        "process_count": lambda backend=None: processes,
        "process_index": lambda backend=None: 0,
        "default_backend": lambda: devices[0].platform if devices else "cpu",
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(jax, name, answer))
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))
        yield


def cpu_world(count: int = 8) -> Any:
    """Of all virtual CPU devices, only the first are there."""
    return world(cpus(count))


def ids(devices: Any) -> Any:
    """Nested lists of the ids of an array of devices."""
    return np.vectorize(lambda one: one.id, otypes=[int])(devices).tolist()


def granule_grid(devices: Any) -> Any:
    """The array's devices as the indices of their slices or, without slices, processes."""
    key = np.vectorize(lambda one: getattr(one, "slice_index", one.process_index), otypes=[int])
    return key(devices)


def changing_axes(grid: Any) -> list[int]:
    """Axes of an array along which its values change."""
    return [axis for axis in range(grid.ndim) if (np.take(grid, [0], axis=axis) != grid).any()]


def is_blocks(grid: Any) -> bool:
    """Whether the places of each value form one box."""
    for value in np.unique(grid):
        places = np.argwhere(grid == value)
        box = places.max(axis=0) - places.min(axis=0) + 1
        if np.prod(box) != len(places):
            return False
    return True


def filled(sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Sizes with the -1 inferred; None if they are none, or do not multiply to the total."""
    if any(size == 0 or size < -1 for size in sizes) or list(sizes).count(-1) > 1:
        return None
    known = math.prod(size for size in sizes if size != -1)
    full = tuple(total // known if size == -1 else size for size in sizes)
    return full if math.prod(full) == total else None
