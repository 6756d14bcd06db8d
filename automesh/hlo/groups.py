"""Device groups of a collective, decoded from the encodings that XLA writes.

Source: xla/hlo/ir/collective_device_list.h, mesh_and_axis.h, replica_group.h and the messages in
xla_data.proto.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from automesh.hlo import hlo_pb2
from automesh.hlo.nouns import Groups

AxisPart = tuple[int, int, int]


def iota_groups(
    groups: int, size: int, reshape: Sequence[int] = (), permutation: Sequence[int] = ()
) -> Groups:
    """Decodes `[groups,size]<=[reshape]T(permutation)`.

    >>> iota_groups(2, 4, (4, 2), (1, 0))
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    return _rows(_iota(groups * size, reshape, permutation).reshape(groups, size))


def mesh_groups(
    sizes: Sequence[int], parts: Sequence[AxisPart], device_ids: Sequence[int] | None = None
) -> Groups:
    """Decodes groups given as axes, or parts of axes, of a mesh.

    Args:
      sizes: of the mesh's axes, major to minor.
      parts: what one group spans, major to minor: (axis, product of the axis's factors before the
        part, size of the part); a whole axis is (axis, 1, its size).
      device_ids: of the mesh, row by row; None means 0, 1, 2 ...

    >>> mesh_groups((2, 4), [(1, 1, 4)])
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> mesh_groups((2, 4), [(1, 2, 2), (0, 1, 2)])
    ((0, 4, 1, 5), (2, 6, 3, 7))
    """
    count = math.prod(sizes)
    devices = np.arange(count) if device_ids is None else np.asarray(device_ids)
    shape: list[int] = []
    where: dict[tuple[int, int], int] = {}
    for axis, size in enumerate(sizes):
        bounds = {1, size}
        for part_axis, before, part in parts:
            if part_axis == axis:
                bounds |= {before, before * part}
        cuts = sorted(bounds)
        for low, high in itertools.pairwise(cuts):
            where[axis, low] = len(shape)
            shape.append(high // low)
    inside = [
        where[axis, low]
        for axis, before, part in parts
        for low in sorted(low for a, low in where if a == axis and before <= low < before * part)
    ]
    outside = [position for position in range(len(shape)) if position not in inside]
    size = math.prod(shape[position] for position in inside)
    return _rows(devices.reshape(shape).transpose(outside + inside).reshape(-1, size))


@lru_cache(maxsize=4096)
def decode_iota(serialized: bytes) -> Groups:
    """Decodes a serialized `IotaReplicaGroupList`."""
    message = hlo_pb2.IotaReplicaGroupList.FromString(serialized)
    return iota_groups(
        message.num_replica_groups,
        message.num_devices_per_group,
        tuple(message.iota_reshape_dims),
        tuple(message.iota_transpose_perm),
    )


@lru_cache(maxsize=4096)
def decode_mesh(serialized: bytes) -> Groups:
    """Decodes a serialized `MeshAxesReplicaGroupList`."""
    message = hlo_pb2.MeshAxesReplicaGroupList.FromString(serialized)
    sizes = [axis.size for axis in message.mesh.axes]
    parts: list[AxisPart] = []
    for axis in message.axes:
        if axis.HasField("sub_axis_info"):
            parts.append(
                (axis.mesh_axis_index, axis.sub_axis_info.pre_size, axis.sub_axis_info.size)
            )
        else:
            parts.append((axis.mesh_axis_index, 1, sizes[axis.mesh_axis_index]))
    ids: Sequence[int] | None = list(message.mesh.device_ids) or None
    if message.mesh.HasField("iota_transform"):
        transform = message.mesh.iota_transform
        ids = (
            _iota(math.prod(sizes), transform.reshape_dims, transform.transpose_perm)
            .reshape(-1)
            .tolist()
        )
    return mesh_groups(sizes, parts, ids)


def _iota(count: int, reshape: Sequence[int], permutation: Sequence[int]) -> np.ndarray:
    devices = np.arange(count).reshape(tuple(reshape) or (count,))
    return devices.transpose(tuple(permutation)) if permutation else devices


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))
