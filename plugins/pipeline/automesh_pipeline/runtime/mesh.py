"""The noun `MpmdMesh`: a mesh cut into one submesh per rank of a pipeline (jax)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of


@dataclass(frozen=True, slots=True)
class MpmdMesh:
    """A mesh whose parts along one axis run different programs.

    Attributes:
      mesh: a mesh with the axis, or the submeshes themselves, which may then differ in shape but
        share no device.
      axis: the axis along which the mesh is cut; rank i of a pipeline has index i.
      keep_axis: whether the submeshes keep that axis, with size 1, as in JaxPP. A mesh without
        another axis keeps it in any case.
      submeshes: the mesh of each rank; its axes have the same types as in `mesh`.

    Raises:
      WrongType: `mesh` is neither a mesh nor a sequence of meshes.
      UsageError: the mesh has no such axis, there are no submeshes, or two share a device.

    Example:
      >>> from automesh import create_mesh
      >>> from automesh.pipeline import MpmdMesh
      >>> cut = MpmdMesh(create_mesh((2, 4), ("pp", "dp")))
      >>> cut.num_ranks, [dict(one.shape) for one in cut.submeshes]
      (2, [{'dp': 4}, {'dp': 4}])
    """

    mesh: Mesh | Sequence[Mesh]
    axis: str = "pp"
    keep_axis: bool = field(default=False, kw_only=True)
    submeshes: tuple[Mesh, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mesh):
            submeshes = _cut(self.mesh, self.axis, keep_axis=self.keep_axis)
        else:
            submeshes = _checked(self.mesh)
            object.__setattr__(self, "mesh", submeshes)
        object.__setattr__(self, "submeshes", submeshes)

    @property
    def num_ranks(self) -> int:
        """The number of submeshes."""
        return len(self.submeshes)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The one shape of all submeshes, for shardings that are valid on every stage.

        Raises:
          UsageError: the submeshes differ in shape.
        """
        shapes = {submesh.abstract_mesh for submesh in self.submeshes}
        if len(shapes) > 1:
            raise UsageError(
                "the submeshes differ in shape, so that no single mesh stands for all of them",
                hint="inside the loss, write shardings as PartitionSpecs: each stage is traced "
                "with its own submesh in force",
            )
        return next(iter(shapes))


def _cut(mesh: Mesh, axis: str, *, keep_axis: bool) -> tuple[Mesh, ...]:
    if axis not in mesh.axis_names:
        raise UsageError(
            f"the mesh has no axis `{axis}`{did_you_mean(axis, mesh.axis_names)}; it has "
            f"{', '.join(mesh.axis_names)}",
            hint="name the axis that the pipeline runs along: MpmdMesh(mesh, axis=...)",
        )
    at = mesh.axis_names.index(axis)
    others = [place for place in range(len(mesh.axis_names)) if place != at or keep_axis]
    kept = others or [at]
    names = tuple(mesh.axis_names[place] for place in kept)
    types = tuple(mesh.axis_types[place] for place in kept)
    parts: Any = np.split(mesh.devices, mesh.devices.shape[at], axis=at)
    return tuple(
        Mesh(part.reshape([part.shape[place] for place in kept]), names, axis_types=types)
        for part in parts
    )


def _checked(meshes: object) -> tuple[Mesh, ...]:
    listed: list[object] = list(cast("Sequence[object]", meshes)) if _is_list(meshes) else [meshes]
    for one in listed:
        if not isinstance(one, Mesh):
            raise WrongType(
                f"`MpmdMesh` takes a jax.sharding.Mesh, or a sequence of them, got {kind_of(one)}",
            )
    submeshes = tuple(cast("list[Mesh]", listed))
    if not submeshes:
        raise UsageError("a pipeline has at least 1 submesh, got none")
    numbered = [(number, set(one.devices.flat)) for number, one in enumerate(submeshes)]
    for (first, some), (second, others) in itertools.combinations(numbered, 2):
        if some & others:
            raise UsageError(
                f"device {min(some & others, key=lambda device: device.id)} is in the submeshes "
                f"{first} and {second}; a device belongs to one rank"
            )
    return submeshes


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
