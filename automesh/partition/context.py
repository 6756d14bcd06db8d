"""The mesh that holds where logical names become shardings."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from automesh.errors import UsageError, check_type
from automesh.mesh.layout.context import find_mesh
from automesh.partition.nouns import MeshLike

MESH_HINT = "enter `jax.set_mesh(mesh)`, or pass `mesh=`"


def mesh_context(mesh: MeshLike) -> AbstractContextManager[Any]:
    """Makes `mesh` the one that holds until the context is left, as `jax.set_mesh` does.

    Example:
      >>> import jax
      >>> from automesh.partition import mesh_context
      >>> mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> with mesh_context(mesh):
      ...     dict(jax.sharding.get_abstract_mesh().shape)
      {'data': 8}

    Args:
      mesh: of devices, or abstract.

    Raises:
      WrongType: `mesh` is no mesh.
    """
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    check_type(mesh, Mesh, "`mesh` must be a jax.sharding.Mesh", hint="make it by create_mesh")
    return jax.set_mesh(mesh)


set_mesh = mesh_context
"""Another name of `mesh_context`, as in Haliax."""


def require_mesh(mesh: MeshLike | None = None) -> MeshLike:
    """The mesh that a sharding here must refer to.

    Raises:
      UsageError: none was given, and no context sets one.
      WrongType: `mesh` is no mesh.
    """
    found = find_mesh(mesh)
    if found is None:
        raise UsageError("no mesh found: none was given, and no context sets one", hint=MESH_HINT)
    return found
