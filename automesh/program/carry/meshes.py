"""Chooses the mesh that replaces each mesh of a stored trace (jax)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from automesh.errors import UsageError
from automesh.program.capture.nouns import AxisSplit, names_in_place
from automesh.program.capture.world.meshes import text_of


class CannotCarry(UsageError):
    """An error that says why the trace of a step cannot be carried to another mesh or process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMesh:
    """A mesh that a trace names.

    Attributes:
      names, sizes, types: names, sizes and types of its axes; types are `auto`, `explicit`,
        `manual`.
      places: positions of its devices among those of the script's mesh, in order; None for a mesh
        without devices. Empty if it has a device that the script's mesh does not have.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]
    places: tuple[int, ...] | None

    def __str__(self) -> str:
        return ",".join(f"{name}:{size}" for name, size in zip(self.names, self.sizes, strict=True))


_WORDS = {AxisType.Auto: "auto", AxisType.Explicit: "explicit", AxisType.Manual: "manual"}
_TYPES = {word: kind for kind, word in _WORDS.items()}


def stored_mesh(mesh: Mesh | AbstractMesh, own: Mesh) -> StoredMesh:
    """Describes a mesh by the devices of the script's own."""
    places: tuple[int, ...] | None = None
    if isinstance(mesh, Mesh):
        among = {device: place for place, device in enumerate(own.devices.flat)}
        found = [among.get(device) for device in mesh.devices.flat]
        places = () if None in found else tuple(place for place in found if place is not None)
    return StoredMesh(
        names=tuple(str(text_of(name)) for name in mesh.axis_names),
        sizes=tuple(int(size) for size in mesh.shape.values()),
        types=tuple(_WORDS[kind] for kind in mesh.axis_types),
        places=places,
    )


@dataclass(slots=True, kw_only=True)
class Binding:
    """Replaces the script's own mesh by that of a plan, and its other meshes accordingly.

    Attributes:
      plan: the mesh of the plan; its axes are the script's or replace them.
      stored: the meshes that the trace names, by number.
      own: the number of the script's own mesh.
      splits: axes of the script that are split into several axes of the plan.
    """

    plan: Mesh
    stored: Sequence[StoredMesh]
    own: StoredMesh
    splits: tuple[AxisSplit, ...] = ()
    _made: dict[int, Any] = field(default_factory=dict[int, Any])

    @property
    def first_device(self) -> Any:
        return self.plan.devices.flat[0]

    @property
    def into(self) -> Mapping[str, tuple[str, ...]]:
        """The axes that replace each split axis, by the script's name of that axis."""
        return names_in_place(self.splits)

    def axes(self, value: Any) -> Any:
        """Replaces names of split axes in a value; returns any other value unchanged."""
        if isinstance(value, str):
            return self.into.get(value, value)
        if isinstance(value, (tuple, list, set, frozenset)):
            parts: list[Any] = []
            for one in value:  # pyright: ignore[reportUnknownVariableType]
                parts += self.into.get(one, (one,)) if isinstance(one, str) else (one,)
            return type(value)(parts)
        return value

    def mesh(self, number: int) -> Mesh:
        """Returns the mesh that replaces a mesh with devices.

        Raises:
          CannotCarry: the replacement is not clear.
        """
        if number not in self._made:
            self._made[number] = self._mesh_for(self.stored[number])
        return self._made[number]

    def abstract_mesh(self, number: int, *, knows_devices: bool) -> AbstractMesh:
        """Returns the mesh that replaces a mesh without devices."""
        stored = self.stored[number]
        names, sizes, types = self._shape(stored)
        more: dict[str, Any] = {}
        if knows_devices:
            known: Any = self.plan.abstract_mesh
            more = {"abstract_device": known.abstract_device}
        return AbstractMesh(sizes, names, axis_types=types, **more)

    def own_mesh(self) -> Mesh:
        """Returns the mesh that replaces the script's own, with the types of its axes."""
        names, _, types = self._own_shape(self.own, tuple(_TYPES[word] for word in self.own.types))
        if names == self.plan.axis_names and types == self.plan.axis_types:
            return self.plan
        devices = self.plan.devices
        order = [self.plan.axis_names.index(name) for name in names]
        return Mesh(devices.transpose(order), names, axis_types=types)

    def joined(self) -> Mesh:
        """Returns the mesh of the script's own axes on the devices of the plan: the parts of a
        split axis are one axis again."""
        groups = [self.into.get(name, (name,)) for name in self.own.names]
        order = [self.plan.axis_names.index(part) for parts in groups for part in parts]
        sizes = [math.prod(int(self.plan.shape[part]) for part in parts) for parts in groups]
        types = tuple(_TYPES[word] for word in self.own.types)
        devices = self.plan.devices.transpose(order).reshape(sizes)
        return Mesh(devices, self.own.names, axis_types=types)

    def _mesh_for(self, stored: StoredMesh) -> Mesh:
        own, devices = self.own, self.plan.devices
        if stored.places == ():
            raise CannotCarry(f"it makes a mesh of other devices ({stored}) than its own ({own})")
        assert stored.places is not None
        names, sizes, types = self._shape(stored)
        flat = devices.reshape(-1)
        if len(stored.places) == 1:
            # The script's mesh has one device, so any device will do: the first one.
            flat = flat[:1] if stored.places[0] == 0 else flat[-1:]
        elif len(flat) != len(stored.places) and _is_reordered(stored.places):
            raise CannotCarry(f"its mesh {stored} has its devices in an order of its own")
        elif len(flat) == len(stored.places):
            flat = flat[list(stored.places)]
        array = np.empty(len(flat), dtype=object)
        array[:] = list(flat)
        return Mesh(array.reshape(sizes), names, axis_types=types)

    def _shape(
        self, stored: StoredMesh
    ) -> tuple[tuple[str, ...], tuple[int, ...], tuple[AxisType, ...]]:
        types = tuple(_TYPES[word] for word in stored.types)
        if set(stored.names) <= set(self.own.names) and self._has_own_sizes(stored):
            return self._own_shape(stored, types)
        if math.prod(stored.sizes) == 1:
            return stored.names, stored.sizes, types
        if math.prod(stored.sizes) == math.prod(self.own.sizes):
            return stored.names, self._scaled(stored), types
        raise CannotCarry(f"it makes a mesh {stored} of some of the devices of its own, {self.own}")

    def _has_own_sizes(self, stored: StoredMesh) -> bool:
        own = dict(zip(self.own.names, self.own.sizes, strict=True))
        return all(own[name] == size for name, size in zip(stored.names, stored.sizes, strict=True))

    def _own_shape(
        self, stored: StoredMesh, types: tuple[AxisType, ...]
    ) -> tuple[tuple[str, ...], tuple[int, ...], tuple[AxisType, ...]]:
        names: list[str] = []
        kinds: list[AxisType] = []
        for name, kind in zip(stored.names, types, strict=True):
            parts = self.into.get(name, (name,))
            names += parts
            kinds += [kind] * len(parts)
        sizes = tuple(int(self.plan.shape[name]) for name in names)
        return tuple(names), sizes, tuple(kinds)

    def _scaled(self, stored: StoredMesh) -> tuple[int, ...]:
        """Returns the sizes that replace those of a mesh which has all devices, but other axes than
        the script's mesh."""
        total, before = self.plan.devices.size, math.prod(stored.sizes)
        if total == before:
            return stored.sizes
        # Only the longest axis grows with the devices; other sizes are the script's own numbers.
        longest = max(range(len(stored.sizes)), key=lambda place: stored.sizes[place])
        rest = before // stored.sizes[longest]
        if total % rest:
            raise CannotCarry(f"its mesh {stored} cannot be made of {total} devices")
        return tuple(
            total // rest if place == longest else size for place, size in enumerate(stored.sizes)
        )

    def check_manual(self, what: str, sizes: Sequence[tuple[str, int]], *, place: str) -> None:
        """Checks that a part of the program that runs per device (`shard_map`) keeps its shapes.

        Raises:
          CannotCarry: its shapes differ from those in the trace.
        """
        for name, size in sizes:
            parts = self.into.get(name, (name,))
            now = math.prod(int(self.plan.shape[part]) for part in parts if part in self.plan.shape)
            if now != size:
                at = f"`{what}` at {place}" if place else f"`{what}`"
                raise CannotCarry(
                    f"{at} works on parts of arrays, which have other shapes with "
                    f"{name}:{now} than with {name}:{size}"
                )


def _is_reordered(places: Sequence[int]) -> bool:
    return tuple(places) != tuple(range(len(places)))
