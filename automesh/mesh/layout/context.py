"""Finds the mesh in force where code runs: of `jax.set_mesh`, or of a legacy `with mesh:` (jax)."""

from __future__ import annotations

import importlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh

from automesh.errors import UsageError, WrongType, check_type, kind_of


def mesh_in_force(mesh: Mesh | None = None) -> Mesh | None:
    """Returns the given mesh, else that of `jax.set_mesh` or a legacy `with mesh:`, else None.

    Inside a traced function, too, it is the concrete mesh: a sharding with that mesh is valid with
    and without a context.

    Raises:
      WrongType: `mesh` is no `jax.sharding.Mesh`.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("dp",))
      >>> with jax.set_mesh(mesh):
      ...     mesh_in_force() is mesh
      True
      >>> mesh_in_force() is None
      True
    """
    if mesh is not None:
        check_type(mesh, Mesh, "`mesh` must be a jax.sharding.Mesh", hint="make it by create_mesh")
        return mesh
    # jax.sharding.get_mesh raises inside a traced function; this is the state that it reads.
    internals: Any = importlib.import_module("jax._src.mesh")
    for found in (internals.get_concrete_mesh(), internals.thread_resources.env.physical_mesh):
        if not found.empty:
            return found
    return None


def find_mesh(mesh: Mesh | AbstractMesh | None = None) -> Mesh | AbstractMesh | None:
    """Returns the mesh that a sharding at this point of a program must use; None without one.

    Inside `jit` under `jax.set_mesh` that is the abstract mesh: jax shares one traced program among
    all meshes of the same sizes, so that the devices of the first would be wrong for the next.
    Inside `shard_map` it is the mesh there, whose manual axes cannot split anything again.

    Args:
      mesh: has priority over all contexts except `shard_map`.

    Raises:
      WrongType: `mesh` is no mesh.

    Example:
      >>> import jax
      >>> with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:2], ("dp",))):
      ...     dict(find_mesh().shape)
      {'dp': 2}
    """
    if mesh is not None and not isinstance(cast("Any", mesh), Mesh | AbstractMesh):
        raise WrongType(
            f"`mesh` must be a jax.sharding.Mesh, got {kind_of(mesh)}",
            hint="make it by create_mesh",
        )
    here = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in here.axis_types:
        return here
    if mesh is not None and not mesh.empty:
        return mesh
    return mesh_in_force() if here.empty or not is_staging() else here


def is_tracing() -> bool:
    """Whether a transformation (`jit`, `grad`, `vmap`, `eval_shape`) is tracing this code.

    Example:
      >>> is_tracing()
      False
    """
    try:
        jax.sharding.get_mesh()
    # It is documented to raise this there; jax has no public query.
    except ValueError:
        return True
    return False


def is_staging() -> bool:
    """Whether computations here are only recorded, as by `jit`; under `grad` alone they are not.

    Example:
      >>> is_staging()
      False
    """
    return is_tracing() and isinstance(jnp.zeros((), np.int8), Tracer)


def need_mesh(mesh: Mesh | None = None, *, what: str) -> Mesh:
    """Returns `mesh_in_force`, or raises an error if there is none.

    Args:
      what: the function that needs it, for the error.

    Raises:
      UsageError: there is none.

    Example:
      >>> import jax
      >>> need_mesh(jax.sharding.Mesh(jax.devices()[:2], ("dp",)), what="shard").size
      2
    """
    found = mesh_in_force(mesh)
    if found is None:
        raise UsageError(
            f"`{what}` needs a mesh, and none is in force",
            hint="pass `mesh=`, or call it inside `with jax.set_mesh(mesh):`",
        )
    return found
