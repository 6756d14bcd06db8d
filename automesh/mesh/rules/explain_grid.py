"""The devices of a mesh as text: axes to physical coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from automesh.mesh.axes import MeshAxis
from automesh.mesh.granules import by_slice, granule_key

Grid = np.ndarray[Any, Any]
# What fits a terminal: characters of a line, rows of a table, lines of all tables.
_WIDTH = 96
_ROWS = 16
_LINES = 48


def in_words(grid: Grid, axes: Sequence[MeshAxis]) -> list[str]:
    """One line per axis larger than 1: its parts, and along what it runs.

    Args:
      grid: [sizes of the axes]; the devices of the mesh.
      axes: of the mesh, in order.

    Returns:
      Lines of text.
    """
    real = [index for index, axis in enumerate(axes) if axis.size > 1]
    width = max((len(axes[index].name) for index in real), default=0)
    lines: list[str] = []
    for index in real:
        axis = axes[index]
        parts = [f"DCN {axis.dcn}"] * (axis.dcn > 1) + [f"ICI {axis.ici}"] * (axis.ici > 1)
        along = ", ".join(_changing(np.moveaxis(grid, index, 0).reshape(axis.size, -1)))
        lines.append(f"  {axis.name:<{width}}  {' x '.join(parts)}: along {along}")
    return lines


def draw_grid(grid: Grid, axes: Sequence[MeshAxis]) -> list[str]:
    """Tables of the devices: the last axis to the right, the one before it down, a table for each
    point of the others. An axis of its own is folded into lines. Axes of size 1 are left out, and
    so is what would not fit a terminal.

    Args:
      grid: [sizes of the axes]; the devices of the mesh.
      axes: of the mesh, in order.

    Returns:
      Lines of text.
    """
    label, legend = _labels(grid)
    named = [axis for axis in axes if axis.size > 1]
    table = grid.reshape([axis.size for axis in named])
    if len(named) < 2:
        return [f"each device: {legend}", *_folded(grid.ravel(), named, label)]
    outer, (down, right) = named[:-2], named[-2:]
    points = list(itertools.product(*(range(axis.size) for axis in outer)))
    lines = [f"each device: {legend}"]
    most = max(1, _LINES // (min(down.size, _ROWS) + 2))
    for point in points[:most]:
        where = ", ".join(f"{axis.name}={at}" for axis, at in zip(outer, point, strict=True))
        lines += [f"{where}:"] if where else []
        lines += _table(table[point], down, right, label)
    if len(points) > most:
        lines.append(f"... and {len(points) - most} more tables")
    return lines


def _folded(devices: Grid, named: Sequence[MeshAxis], label: Callable[[Any], str]) -> list[str]:
    """All devices of a mesh of one axis, or of none."""
    name = named[0].name if named else ""
    cell = max(len(label(device)) for device in devices)
    fitting = max(1, (_WIDTH - len(name) - 8) // (cell + 2))
    each = max(size for size in range(1, fitting + 1) if len(devices) % size == 0)
    rows = _shown(len(devices) // each, _ROWS)
    head = [f"{name} ->" if name else "", *(f"+{at}" for at in range(each))]
    body = [
        ["..."] * (each + 1)
        if row is None
        else [str(row * each), *map(label, devices[row * each : (row + 1) * each])]
        for row in rows
    ]
    return _aligned([head, *body])


def _table(grid: Grid, down: MeshAxis, right: MeshAxis, label: Callable[[Any], str]) -> list[str]:
    corner = f"{right.name} ->"
    left = max(len(corner), len(_row_name(down, grid.shape[0] - 1)))
    cell = max(len(label(device)) for device in grid.flat)
    columns = _shown(grid.shape[1], max(3, (_WIDTH - left) // (cell + 2)))
    rows = _shown(grid.shape[0], _ROWS)
    head = [corner, *("..." if at is None else str(at) for at in columns)]
    body = [
        [
            _row_name(down, row),
            *("..." if None in (row, at) else label(grid[row, at]) for at in columns),
        ]
        for row in rows
    ]
    return _aligned([head, *body])


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip()
        for line in lines
    ]


def _row_name(down: MeshAxis, row: int | None) -> str:
    return "..." if row is None else f"{down.name} {row}"


def _shown(size: int, most: int) -> list[int | None]:
    """The indices that are shown; None where some are left out."""
    if size <= most:
        return list(range(size))
    return [*range(most - 2), None, size - 1]


def _labels(grid: Grid) -> tuple[Callable[[Any], str], str]:
    """How a device is written, and what that means."""
    devices = list(grid.flat)
    slices = by_slice(devices)
    several = len({granule_key(device, slices=slices) for device in devices}) > 1
    cores = len({getattr(device, "core_on_chip", 0) for device in devices}) > 1
    placed = _is_placed(devices)

    def label(device: Any) -> str:
        text = ",".join(map(str, device.coords)) if placed else str(device.id)
        text += f".{device.core_on_chip}" if cores and placed else ""
        return f"{granule_key(device, slices=slices)}:{text}" if several else text

    granule = ("slice:" if slices else "process:") if several else ""
    place = "x,y,z" + (".core" if cores else "") if placed else "id"
    return label, granule + place


def _changing(lines: Grid) -> list[str]:
    """What changes along an axis, of [size of the axis, others]: slices, dimensions, devices."""
    first = list(lines[:, 0])
    slices = by_slice(first)
    granules = {granule_key(device, slices=slices) for device in first}
    found = ["slices" if slices else "processes"] if len(granules) > 1 else []
    if not _is_placed(first):
        return found + (["the devices of a process"] if len(granules) < len(first) else [])
    coords = np.array([(*device.coords, getattr(device, "core_on_chip", 0)) for device in first])
    names = [*"xyz"[: coords.shape[1] - 1], "cores"]
    return found + [name for name, along in zip(names, coords.T) if len(set(along.tolist())) > 1]


def _is_placed(devices: Sequence[Any]) -> bool:
    """True for TPUs that say where they are in their slice."""
    return by_slice(devices) and all(getattr(device, "coords", ()) for device in devices)
