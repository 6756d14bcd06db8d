"""Lays out meshes of 64 x 4 and 32 x 8 on a v5e or v6e pod so that the inner axis is a ring.

A pod is a torus of 16 x 16 chips. jax lays an inner axis of 4 along a part of one dimension, whose
ends are not linked. MaxText (`hybrid_ring_64x4`, `hybrid_ring_32x8`) and AXLearn fold the axis
instead: 4 chips are a square of 2 x 2, 8 chips a strip of 2 x 4, so that every chip of a group is
linked to the next and the last to the first. The groups follow row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from automesh.mesh.granules import LocatedDevice

_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
_POD = (16, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A way to fold an axis to a ring.

    Attributes:
      grid: chips along both dimensions of the slice.
      block: rows and columns of the block that one ring fills; two rows.
    """

    grid: tuple[int, int]
    block: tuple[int, int]


# Sizes of the mesh axes larger than 1 -> the rings of the last of them.
_RINGS: dict[tuple[int, ...], Ring] = {
    (64, 4): Ring(grid=_POD, block=(2, 2)),
    (32, 8): Ring(grid=_POD, block=(2, 4)),
}


def ring_of(sizes: Sequence[int], devices: Sequence[LocatedDevice]) -> Ring | None:
    """Returns the rings for a mesh of these sizes on these devices; None: jax's own layout.

    Args:
      sizes: of the axes inside one granule; axes of size 1 may be anywhere.
      devices: of the granule.

    Example:
      >>> ring_of((64, 4), ()) is None
      True
    """
    ring = _RINGS.get(tuple(size for size in sizes if size > 1))
    if ring is None or len(devices) != math.prod(ring.grid):
        return None
    kinds = {getattr(device, "device_kind", "") for device in devices}
    places = [tuple(getattr(device, "coords", ())) for device in devices]
    if len(kinds) != 1 or kinds.isdisjoint(_KINDS) or not all(places):
        return None
    extents = tuple(max(along) - min(along) + 1 for along in zip(*places, strict=True))
    return ring if extents[:2] == ring.grid else None


def rings_on(grid: np.ndarray[Any, Any], ring: Ring) -> np.ndarray[Any, Any]:
    """Orders the chips of a slice as [rings, chips of a ring].

    Args:
      grid: [rows, columns] of the slice.

    Example:
      Two rows of four chips as two rings of a square each: to the right, then back.

      >>> rings_on(np.arange(8).reshape(2, 4), Ring(grid=(2, 4), block=(2, 2)))
      array([[0, 1, 5, 4],
             [2, 3, 7, 6]])
    """
    rows, columns = ring.block
    down, right = grid.shape[0] // rows, grid.shape[1] // columns
    blocks = grid.reshape(down, rows, right, columns).transpose(0, 2, 1, 3)
    upper, lower = blocks[:, :, 0], blocks[:, :, 1, ::-1]
    return np.concatenate([upper, lower], axis=-1).reshape(down * right, rows * columns)
