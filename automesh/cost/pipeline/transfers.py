"""Prices transfers between the submeshes of a pipeline: which links, and how long (no jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pipeline.step import STAYS, Move
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats, Route
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import MeshAxis, Plan
from automesh.mesh.plan_arrays import Batch, batch_of


def moves(
    payload_bytes: Sequence[float],
    targets: Sequence[int],
    homes: Sequence[int],
    *,
    axes: Sequence[MeshAxis],
    axis: str,
    hardware: HardwareModel,
) -> list[Move]:
    """Prices what stages send to others on one mesh.

    Every device sends its part to the device at the same position in the other submesh, all at
    once.

    Args:
      payload_bytes: what one device of each stage sends for one microbatch.
      targets: the stage that each stage sends to; -1 for none.
      homes: the rank of each stage.
      axes: of the mesh.
      axis: the axis of the pipeline.
      hardware: with the layout of the mesh's ICI shape at least.
    """
    batch = batch_of([Plan(axes=tuple(axes))])
    route = hardware.routes(batch, (axis,))
    payload = np.array(payload_bytes, np.float64)[:, None]
    found = batch_moves(
        payload, targets, homes, batch=batch, axis=axis, route=route, speeds=hardware.speeds
    )
    return [one[0] for one in found]


def batch_moves(
    payload_bytes: Floats,
    targets: Sequence[int],
    homes: Sequence[int],
    *,
    batch: Batch,
    axis: str,
    route: Route,
    speeds: Speeds,
) -> list[list[Move]]:
    """Prices what stages send to others on many meshes: a move per stage and mesh.

    Args:
      payload_bytes: [stages, meshes]; see `moves`.
      route: of `axis` on these meshes.
    """
    column = batch.names.index(axis)
    inside = batch.ici[:, column]
    one = np.ones(len(batch))
    near = replace(route, dcn_size=one)
    far = replace(route, ici_size=one, dcn_size=2 * one)
    found: list[list[Move]] = []
    for stage, (target, payload) in enumerate(zip(targets, payload_bytes, strict=True)):
        if target < 0 or homes[target] == homes[stage]:
            found.append([STAYS] * len(batch))
            continue
        crosses = _granule(homes[stage], inside) != _granule(homes[target], inside)
        seconds = np.where(crosses, _seconds(payload, far, speeds), _seconds(payload, near, speeds))
        found.append(
            [
                Move(seconds=float(each), cause=f"{'dcn' if is_far else 'ici'} {axis}")
                for each, is_far in zip(seconds, crosses, strict=True)
            ]
        )
    return found


def _granule(rank: int, inside: NDArray[np.int64]) -> NDArray[np.int64]:
    # The part of an axis that crosses DCN is its major part.
    return rank // inside


def _seconds(payload: Floats, route: Route, speeds: Speeds) -> Floats:
    # On a mesh where the axis uses other links, this divides by 0 links; the result is not used.
    with np.errstate(invalid="ignore", divide="ignore"):
        each = speeds.collective_s("collective-permute", payload, route)
    return np.where(payload > 0, each.latency_s + each.ici_s + each.dcn_s, 0.0)
