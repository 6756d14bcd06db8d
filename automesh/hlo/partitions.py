"""Maps the partitions of a module to elements of the mesh.

A program for several TPU slices is compiled for the devices of one slice: its partitions count the
elements of the mesh that lie in a slice, in the order of the mesh, and every slice runs it. All
other programs count the elements of the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from automesh.hlo.nouns import Groups, Module
from automesh.hlo.spans import Axes

Pairs = tuple[tuple[int, int], ...]


class Partitions:
    """Translates partition ids of one module to indices into `mesh.devices.flat`.

    Attributes:
      axes: names and sizes of the mesh's axes, in order.
      elements: [slices, partitions of a slice]: an index for each; one row if the program is not
        split by slices.
    """

    def __init__(self, module: Module, axes: Axes, dcn: Sequence[int] = ()) -> None:
        """Finds out which elements the module's ids count.

        Args:
          dcn: number of slices that each axis spans; empty if none spans more than one.

        Raises:
          ValueError: the number of the module's devices times `dcn` is not that of the mesh.
        """
        self.axes = axes
        self._position = {device: number for number, device in enumerate(module.device_ids)}
        sizes = [size for _, size in axes]
        total = math.prod(sizes)
        inside = len(module.device_ids) or total
        if inside == total:
            self.elements = np.arange(total).reshape(1, total)
            return
        outer = [*dcn, *[1] * (len(axes) - len(dcn))]
        if inside * math.prod(outer) != total:
            raise ValueError(
                f"the program runs on {inside} devices of a slice, which is not the mesh "
                f"{dict(axes)} over {math.prod(outer)} slices"
            )
        self.elements = _by_slice(tuple(sizes), tuple(outer))

    def groups(self, listed: Groups) -> Groups:
        """Translates groups of partitions, in every slice; no groups mean one of all in a slice."""
        listed = listed or (tuple(range(self.elements.shape[1])),)
        return _translate(self._rows(), listed)

    def pairs(self, listed: Pairs) -> Pairs:
        """Translates pairs of partitions, in every slice."""
        return tuple((one, other) for one, other in _translate(self._rows(), listed))

    def element(self, number: int, device_id: int) -> int:
        """Returns the element of the mesh for a device of slice `number`, counted from 0.

        Raises:
          ValueError: there is none.
        """
        partition = self._position.get(device_id, -1)
        if not (0 <= number < self.elements.shape[0] and partition >= 0):
            raise ValueError(f"device {device_id} of slice {number} is outside the mesh")
        return int(self.elements[number, partition])

    def _rows(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.elements.tolist()))


@lru_cache(maxsize=4096)
def _translate(rows: tuple[tuple[int, ...], ...], listed: Groups) -> Groups:
    largest = max((max(group) for group in listed if group), default=0)
    if largest >= len(rows[0]):
        raise ValueError(f"device {largest} is outside the mesh of {len(rows[0])} devices")
    return tuple(tuple(row[one] for one in group) for row in rows for group in listed)


def _by_slice(sizes: tuple[int, ...], outer: tuple[int, ...]) -> np.ndarray:
    """Orders rows by slice; along each axis the slice is the major part, as in
    `create_hybrid_device_mesh`."""
    inner = [size // part for size, part in zip(sizes, outer)]
    split = np.arange(math.prod(sizes)).reshape([n for pair in zip(outer, inner) for n in pair])
    axes = range(len(sizes))
    order = [2 * axis for axis in axes] + [2 * axis + 1 for axis in axes]
    return split.transpose(order).reshape(math.prod(outer), -1)
