"""Reads mesh axes in MLIR: shardings of values, groups of collectives (jax)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from automesh.sharding.passes import Bindings

_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_Groups = Sequence[Sequence[int]]
# Per dimension the axes that split it; the shape of a part; the same without padding, if any.
_Split = tuple[tuple[tuple[str, ...], ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]


class MeshReader:
    """The mesh of one module.

    A sub-axis (a part of an axis, where an array cannot be split over the whole axis) has no name
    of its own: the array's shape is divided by its size, and the axis noted in `sub_axes`.

    Attributes:
      mesh: names and sizes, in order.
      sub_axes: axes of which some array or collective uses a part.
      padded: axes that do not divide some dimension evenly: the compiler pads it to equal parts.
    """

    def __init__(self, found: Bindings, module: Any) -> None:
        self._sdy = found.sdy
        self.sub_axes: set[str] = set()
        self.padded: set[str] = set()
        self.mesh: tuple[tuple[str, int], ...] = ()
        self._read: dict[tuple[Any, tuple[int, ...], tuple[str, ...]], _Split] = {}
        for operation in module.regions[0].blocks[0].operations:
            if operation.operation.name == "sdy.mesh":
                axes = found.sdy.MeshAttr(operation.operation.attributes["mesh"]).axes
                read = [found.sdy.MeshAxisAttr(axis) for axis in axes]
                mesh = tuple((str(axis.name), int(axis.size)) for axis in read)
                # An empty mesh means one device.
                self.mesh = mesh if len(mesh) > len(self.mesh) else self.mesh
        self._order = {name: position for position, (name, _) in enumerate(self.mesh)}
        self._sizes = dict(self.mesh)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Orders names as the mesh does, each once."""
        return tuple(sorted(set(names), key=self.place))

    def place(self, name: str) -> int:
        """Returns the position of an axis in the mesh."""
        return self._order.get(name, len(self._order))

    def size(self, names: Iterable[str]) -> int:
        """Counts the devices along all of the axes together."""
        return math.prod(self._sizes.get(name, 1) for name in names)

    def dimensions(self, sharding: Any, shape: tuple[int, ...], manual: tuple[str, ...]) -> _Split:
        """Returns axes per dimension without manual ones, the shape with and without padding, and
        the axes of which a part splits it.

        The shape is divided by the sub-axes that split it, and padded to equal parts.
        """
        # MLIR keeps equal attributes once, and a program has few that differ.
        key = (sharding, shape, manual)
        if key not in self._read:
            self._read[key] = self._dimensions(sharding, shape, manual)
        return self._read[key]

    def _dimensions(self, sharding: Any, shape: tuple[int, ...], manual: tuple[str, ...]) -> _Split:
        split: list[tuple[str, ...]] = []
        in_part: dict[str, None] = {}
        divided, stated = list(shape), list(shape)
        parts = self._sdy.TensorShardingAttr(sharding).dimension_shardings
        for position, part in enumerate(parts):
            names: list[str] = []
            for reference in map(self._sdy.AxisRefAttr, self._sdy.DimensionShardingAttr(part).axes):
                if reference.name in manual:
                    continue
                if reference.sub_axis_info is None:
                    names.append(reference.name)
                else:
                    size = self._sdy.SubAxisInfoAttr(reference.sub_axis_info).size
                    divided[position] = -(-divided[position] // size)
                    stated[position] = divided[position]
                    self.sub_axes.add(reference.name)
                    in_part[reference.name] = None
            parts_of = self.size(names)
            if divided[position] % parts_of:
                divided[position] += -divided[position] % parts_of
                self.padded.update(names)
            split.append(tuple(names))
        padded_from = tuple(stated) if stated != divided else ()
        return tuple(split), tuple(divided), padded_from, tuple(in_part)

    def named(self, attribute: Any) -> tuple[tuple[str, ...], int]:
        """Parses axes in the text of a Shardy attribute, and counts the devices along them.

        The bindings have no class for lists of axes.
        """
        names: list[str] = []
        group = 1
        for name, _, part in _AXIS.findall(str(attribute)):
            names.append(name)
            group *= int(part) if part else self._sizes.get(name, 1)
            if part:
                self.sub_axes.add(name)
        return self.in_order(names), group

    def named_by_dimension(self, attribute: Any) -> tuple[tuple[str, ...], ...]:
        """Parses the axes of each dimension in `[{"dp"}, {}]`."""
        return tuple(
            tuple(name for name, _, _ in _AXIS.findall(part))
            for part in re.findall(r"\{([^}]*)\}", str(attribute))
        )

    def of_groups(self, groups: _Groups) -> tuple[tuple[str, ...], int, bool]:
        """Returns the axes along which members of a group differ, and devices per group.

        Also whether the groups are exactly the slices of the mesh along these axes.
        """
        size = max((len(group) for group in groups), default=1)
        axes = self._varying([(group[0], member) for group in groups for member in group])
        return axes, size, self.size(axes) == size

    def of_pairs(self, pairs: _Groups) -> tuple[str, ...]:
        """Returns the axes along which sources and targets differ."""
        return self._varying([(pair[0], pair[1]) for pair in pairs])

    def _varying(self, pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        known = [pair for pair in pairs if pair[0] >= 0 and pair[1] >= 0]
        shape = tuple(size for _, size in self.mesh)
        if not known or not shape or max(map(max, known)) >= math.prod(shape):
            return ()
        first, second = (
            np.stack(np.unravel_index([pair[side] for pair in known], shape)) for side in (0, 1)
        )
        varying = (first != second).any(axis=1)
        return tuple(name for (name, _), differs in zip(self.mesh, varying, strict=True) if differs)
