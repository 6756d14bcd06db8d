"""Explains which rule gives a mesh, how its sizes were inferred, and where its axes are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.granules import as_devices, by_slice, granule_key, granules_of
from automesh.mesh.infer import resolve_shape, spread_over_granules
from automesh.mesh.lazy_jax import jax_half
from automesh.mesh.mapping import LogicalMapping
from automesh.mesh.rules.rule import MeshRule, check_selector, explain_match, first_match
from automesh.mesh.settings import Settings
from automesh.mesh.shape import HybridMeshShape, MeshShape
from automesh.texts.terminal import clean_lines

# Describes the devices of a mesh: axes and their physical coordinates.

Grid = np.ndarray[Any, Any]
# Limits for a terminal: characters of a line, rows of a table, lines of all tables.
_WIDTH = 96
_ROWS = 16
_LINES = 48


def in_words(grid: Grid, axes: Sequence[MeshAxis]) -> list[str]:
    """Writes one line per axis larger than 1: its parts, and what it runs along.

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
    """Draws tables of the devices.

    The last axis goes to the right, the one before it down, with a table for each point of the
    others. A single axis is wrapped into lines. Axes of size 1 are left out, and so are rows and
    columns that do not fit a terminal.

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
    """Draws all devices of a mesh with at most one axis."""
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
    """Lists the indices that are shown; None where some are left out."""
    if size <= most:
        return list(range(size))
    return [*range(most - 2), None, size - 1]


def _labels(grid: Grid) -> tuple[Callable[[Any], str], str]:
    """Returns the labels of devices, and their meaning."""
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
    """Says what changes along an axis, [size of the axis, others]: slices, devices, ..."""
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
    """Whether these are TPUs that report their places in a slice."""
    return by_slice(devices) and all(getattr(device, "coords", ()) for device in devices)


def explain_rules(rules: Sequence[MeshRule], selector: str | None) -> list[str]:
    """Explains which rule of a config gives the mesh for a target, and why the others do not.

    Args:
      rules: in order.
      selector: name of the target; None: none was given.

    Returns:
      Lines of text.

    Example:
      >>> rules = [MeshRule(match="tpu-v6e-256", mesh_shape=(4,))]
      >>> print("\\n".join(explain_rules(rules, "tpu-v6e-256-4")))
      `tpu-v6e-256-4`: no rule matches the whole of it; the default mesh
        1. `tpu-v6e-256` matches only the beginning, `tpu-v6e-256`
    """
    if selector is None:
        unused = f" ({len(rules)} rules are not asked)" if rules else ""
        return [f"no selector: the default mesh{unused}"]
    check_selector(selector)
    if not rules:
        return [f"`{selector}`: there are no rules; the default mesh"]
    first = first_match(rules, selector)
    lines = [f"`{selector}`: {_winner(rules, first)}"]
    for index, rule in enumerate(rules):
        said = explain_match(rule, selector)
        if said == "matches":
            said = "matches first" if index == first else f"matches too, after rule {first + 1}"
        lines.append(f"  {index + 1}. `{rule.match}` {said}")
    # The lines are printed, and anybody may have written the rules file.
    return [clean_lines(line) for line in lines]


def explain_settings(
    knobs: Settings, compiler_options: Settings, mapping: LogicalMapping
) -> list[str]:
    """Describes the settings of a mesh, a line each; empty ones are left out.

    Example:
      >>> explain_settings(Settings({"remat": "full"}), Settings(), LogicalMapping({"mlp": "tp"}))
      ['knobs: remat=full', 'mapping: mlp:tp']
    """
    lines = [
        f"{what}: {' '.join(f'{name}={value}' for name, value in settings.items())}"
        for what, settings in (("knobs", knobs), ("compiler options", compiler_options))
        if settings
    ]
    lines += [f"mapping: {mapping}"] if mapping else []
    return [clean_lines(line) for line in lines]


def explain_mesh(
    shape: MeshShape, names: Sequence[str], devices: Sequence[Any] | None = None
) -> list[str]:
    """Explains how a shape becomes a mesh, and the device at each point (this imports jax).

    A shape that does not fit the devices is explained too: the last line says what does not fit.

    Args:
      devices: jax devices; default: all of the default backend.

    Returns:
      Lines of text.

    Raises:
      UsageError: the devices form no granules of one size.

    Example:
      >>> for line in explain_mesh((2, -1), ("data", "model"))[2:4]:
      ...     print(line.split(" = ")[0])
      -1: model
      DCN: one granule, all 1
    """
    chosen = jax_half().attached_devices() if devices is None else as_devices(devices)
    granules = granules_of(chosen)
    lines = [f"mesh shape: {_shape_in_words(shape, names)}", f"devices: {_devices(chosen)}"]
    try:
        resolved = resolve_shape(shape, num_devices=len(chosen), num_granules=len(granules))
        axes = [
            MeshAxis(name=name, ici=ici, dcn=dcn)
            for name, ici, dcn in zip(names, resolved.ici_mesh_shape, resolved.dcn_mesh_shape)
        ]
        mesh = jax_half().create_mesh_for(axes, devices=chosen)
    except UsageError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return [*lines, f"it does not fit these devices: {error.message}{hint}"]
    lines += _inferred(shape, resolved, names)
    lines.append(_granules_in_words(shape, resolved, names, len(granules)))
    lines.append(f"mesh: {format_mesh(axes)}")
    return [*lines, *in_words(mesh.devices, axes), *draw_grid(mesh.devices, axes)]


def _winner(rules: Sequence[MeshRule], first: int) -> str:
    if first == len(rules):
        return "no rule matches the whole of it; the default mesh"
    if rules[first].mesh_shape is None:
        return f"rule {first + 1}, which asks for the default mesh"
    return f"rule {first + 1}"


def _shape_in_words(shape: MeshShape, names: Sequence[str]) -> str:
    if isinstance(shape, HybridMeshShape):
        ici, dcn = shape.ici_mesh_shape, shape.dcn_mesh_shape
        return f"ICI {_sizes_in_words(ici, names)}; DCN {_sizes_in_words(dcn, names)}"
    return _sizes_in_words(shape, names)


def _sizes_in_words(sizes: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {size}" for name, size in zip(names, sizes))


def _devices(devices: Sequence[Any]) -> str:
    granules = granules_of(devices)
    slices = by_slice(devices)
    what = "slice" if slices else "process"
    kinds = sorted({getattr(device, "device_kind", device.platform) for device in devices})
    keys = sorted({granule_key(device, slices=slices) for device in devices})
    told = ", ".join(map(str, keys[:8])) + (", ..." if len(keys) > 8 else "")
    if len(granules) == 1:
        return f"{len(devices)} x {' and '.join(kinds)}, all of {what} {told}"
    plural = "slices" if slices else "processes"
    return (
        f"{len(devices)} x {' and '.join(kinds)} in {len(granules)} granules of "
        f"{len(granules[0])} each: {plural} {told}"
    )


def _inferred(shape: MeshShape, resolved: HybridMeshShape, names: Sequence[str]) -> list[str]:
    """Explains how each -1 got its size."""
    if isinstance(shape, HybridMeshShape):
        parts = (
            ("ICI ", "devices of a granule", shape.ici_mesh_shape, resolved.ici_mesh_shape),
            ("DCN ", "granules", shape.dcn_mesh_shape, resolved.dcn_mesh_shape),
        )
    else:
        pairs = zip(resolved.ici_mesh_shape, resolved.dcn_mesh_shape, strict=True)
        parts = (("", "devices", shape, tuple(ici * dcn for ici, dcn in pairs)),)
    lines: list[str] = []
    for part, what, given, sizes in parts:
        if -1 in given:
            axis, total = given.index(-1), math.prod(sizes)
            others = total // sizes[axis]
            lines.append(f"-1: {part}{names[axis]} = {total} {what} / {others} = {sizes[axis]}")
    return lines


def _granules_in_words(
    shape: MeshShape, resolved: HybridMeshShape, names: Sequence[str], num_granules: int
) -> str:
    """Explains the DCN sizes."""
    if isinstance(shape, HybridMeshShape):
        return "DCN: given"
    if num_granules == 1:
        return "DCN: one granule, all 1"
    across = [axis for axis, size in enumerate(resolved.dcn_mesh_shape) if size > 1]
    sizes = [
        ici * dcn for ici, dcn in zip(resolved.ici_mesh_shape, resolved.dcn_mesh_shape, strict=True)
    ]
    if spread_over_granules(shape, resolved):
        split = ", ".join(f"{names[axis]} {resolved.dcn_mesh_shape[axis]}" for axis in across)
        return (
            f"DCN: the first axis larger than 1, {names[across[0]]}, is no multiple of the "
            f"{num_granules} granules, so that several span them: {split}"
        )
    axis = across[0]
    return (
        f"DCN: {names[axis]} is the first axis larger than 1, and its {sizes[axis]} is a multiple "
        f"of the {num_granules} granules"
    )
