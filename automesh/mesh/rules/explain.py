"""In words: which rule gives a mesh, how its open sizes were inferred, and where its axes lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.granules import as_devices, by_slice, granule_key, granules_of
from automesh.mesh.infer import resolve_shape, spread_over_granules
from automesh.mesh.lazy_jax import jax_half
from automesh.mesh.mapping import LogicalMapping
from automesh.mesh.rules.explain_grid import draw_grid, in_words
from automesh.mesh.rules.rule import MeshRule, check_selector, explain_match, first_match
from automesh.mesh.settings import Settings
from automesh.mesh.shape import HybridMeshShape, MeshShape


def explain_rules(rules: Sequence[MeshRule], selector: str | None) -> list[str]:
    """Which rule of a config gives the mesh for a target, and why the others do not.

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
    return lines


def explain_settings(
    knobs: Settings, compiler_options: Settings, mapping: LogicalMapping
) -> list[str]:
    """What goes with a mesh: a line each, none for what is empty.

    Example:
      >>> explain_settings(Settings({"remat": "full"}), Settings(), LogicalMapping({"mlp": "tp"}))
      ['knobs: remat=full', 'mapping: mlp:tp']
    """
    lines = [
        f"{what}: {' '.join(f'{name}={value}' for name, value in settings.items())}"
        for what, settings in (("knobs", knobs), ("compiler options", compiler_options))
        if settings
    ]
    return lines + ([f"mapping: {mapping}"] if mapping else [])


def explain_mesh(
    shape: MeshShape, names: Sequence[str], devices: Sequence[Any] | None = None
) -> list[str]:
    """How a shape becomes a mesh, and the device at each of its points (this imports jax).

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
    """How each -1 got its size."""
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
    """How the DCN sizes came about."""
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
