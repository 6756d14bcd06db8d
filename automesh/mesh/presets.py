"""Loadax's two presets: they make a mesh from the attached devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automesh.errors import UsageError
from automesh.mesh.config import SEED_BATCH, MeshConfig
from automesh.mesh.granules import as_devices, granules_of
from automesh.mesh.lazy_jax import jax_half
from automesh.mesh.names import as_names
from automesh.mesh.rules.rule import OwnRules, check_selector, first_match
from automesh.mesh.shape import HybridMeshShape


def make_ddp_mesh_config(
    mesh_axis_names: Sequence[str] = ("data",),
    batch_axis_names: str | Sequence[str] = SEED_BATCH,
    mesh_rules: OwnRules | None = None,
    mesh_selector: str | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> MeshConfig:
    """Makes a config for data parallelism (this imports jax).

    All devices are along the first axis, between granules and inside them.

    Args:
      mesh_axis_names: names of the mesh axes; those after the first get the size 1.
      batch_axis_names: axes that the rows of a batch are split over; default: `data`, if there is
        such an axis.
      mesh_rules: other meshes for named targets, see `MeshConfig`.
      mesh_selector: name of this target; None asks no rule.
      devices: jax devices to count; default: all of the default backend. Granules are TPU slices
        or, elsewhere, processes.

    Raises:
      UsageError: no devices, granules of different sizes, names that do not fit, or the rule that
        matches has no mesh.

    Example:
      >>> import jax
      >>> make_ddp_mesh_config(devices=jax.devices()[:8]).mesh_shape
      HybridMeshShape(ici_mesh_shape=(8,), dcn_mesh_shape=(1,))
    """
    granules, each = _discovered(devices)
    ones = (1,) * (len(as_names(mesh_axis_names, "mesh axis names")) - 1)
    shape = HybridMeshShape((each, *ones), (granules, *ones))
    return _config(shape, mesh_axis_names, batch_axis_names, mesh_rules, mesh_selector)


def make_fsdp_mesh_config(
    mesh_axis_names: Sequence[str],
    batch_axis_names: str | Sequence[str] = SEED_BATCH,
    mesh_rules: OwnRules | None = None,
    mesh_selector: str | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> MeshConfig:
    """Makes a config that is fully sharded in granules, data parallel between (imports jax).

    The last axis takes the devices of a granule, the first axis the granules.

    Args:
      mesh_axis_names: names of the mesh axes; those in the middle get the size 1.
      batch_axis_names: axes that the rows of a batch are split over; default: `data`, if there is
        such an axis.
      mesh_rules: other meshes for named targets, see `MeshConfig`.
      mesh_selector: name of this target; None asks no rule.
      devices: jax devices to count; default: all of the default backend. Granules are TPU slices
        or, elsewhere, processes.

    Raises:
      UsageError: no devices, granules of different sizes, names that do not fit, or the rule that
        matches has no mesh.

    Example:
      >>> import jax
      >>> make_fsdp_mesh_config(("data", "model"), devices=jax.devices()[:8]).mesh_shape
      HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(1, 1))
    """
    granules, each = _discovered(devices)
    ones = (1,) * (len(as_names(mesh_axis_names, "mesh axis names")) - 1)
    shape = HybridMeshShape((*ones, each), (granules, *ones))
    return _config(shape, mesh_axis_names, batch_axis_names, mesh_rules, mesh_selector)


def _discovered(devices: Sequence[Any] | None) -> tuple[int, int]:
    """Returns the number of granules, and of devices in each."""
    granules = granules_of(
        jax_half().attached_devices() if devices is None else as_devices(devices)
    )
    return len(granules), len(granules[0])


def _config(
    shape: HybridMeshShape,
    names: Sequence[str],
    batch: str | Sequence[str],
    rules: OwnRules | None,
    selector: str | None,
) -> MeshConfig:
    config = MeshConfig(
        mesh_shape=shape, mesh_axis_names=names, batch_axis_names=batch, mesh_rules=rules
    )
    if selector is None:
        return config
    found = first_match(config.mesh_rules, check_selector(selector))
    if found < len(config.mesh_rules) and config.mesh_rules[found].mesh_shape is None:
        raise UsageError(
            f"the rule `{config.mesh_rules[found].match}`, which matches `{selector}`, has no mesh",
            hint="leave the rule out to have the mesh found from the devices",
        )
    return config.select(selector)
