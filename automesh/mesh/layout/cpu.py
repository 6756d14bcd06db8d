"""Meshes and computations on this host's CPU, whatever other devices are attached (jax).

The three functions are those of eformer's `escale.mesh.creation`; they set the mesh by
`jax.set_mesh`, and only use devices of this process, so that they work on each host of a pod alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError
from automesh.mesh.axes import DEFAULT_AXES
from automesh.mesh.layout.create import DEFAULT_DIMS, mesh_on


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS, axis_names: Sequence[str] = DEFAULT_AXES
) -> Mesh:
    """Makes a mesh of this process's CPU devices, with Auto axes.

    Args:
      axis_dims: devices along each axis; one may be -1.
      axis_names: a name for each size.

    Raises:
      UsageError: sizes, names and devices do not fit each other, or jax is configured without the
        CPU.
      WrongType: an argument of the wrong type; also a `TypeError`.

    Example:
      >>> dict(create_cpu_mesh((2, -1), ("data", "model")).shape)
      {'data': 2, 'model': 4}
    """
    return mesh_on(_cpus(), axis_dims, axis_names)


@contextmanager
def force_cpu() -> Generator[Any]:
    """Runs computations without device-bound arrays on this process's first CPU device.

    Yields:
      That device. It is the default device of jax until the block ends, in this thread.

    Raises:
      UsageError: jax was told to leave the CPU out.

    Example:
      >>> import jax.numpy as jnp
      >>> with force_cpu() as device:
      ...     jnp.ones(2).devices() == {device}
      True
    """
    device = _cpus()[0]
    with jax.default_device(device):
        yield device


@contextmanager
def cpu_context() -> Generator[Mesh]:
    """Enters `jax.set_mesh(create_cpu_mesh())` and `force_cpu()`.

    Yields:
      The mesh, of the axes dp, fsdp, ep, tp and sp with all devices along fsdp.

    Raises:
      UsageError: inside a traced function, or jax is configured without the CPU.

    Example:
      >>> with cpu_context() as mesh:
      ...     mesh is jax.sharding.get_mesh()
      True
    """
    mesh = create_cpu_mesh()
    with force_cpu():
        try:
            in_force = jax.set_mesh(mesh)
        except ValueError as error:
            raise UsageError(
                f"`cpu_context` cannot be entered here: {error}",
                hint="enter it around the jitted function, not inside",
            ) from error
        with in_force:
            yield mesh


def _cpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise UsageError(
            f"jax sees no CPU devices: {str(error).splitlines()[0]}",
            hint="JAX_PLATFORMS must name cpu, too, as in `JAX_PLATFORMS=tpu,cpu`",
        ) from error
