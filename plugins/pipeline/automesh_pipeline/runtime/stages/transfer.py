"""Moves arrays between the submeshes of a pipeline, in one process or in several (jax).

Several processes all plan the same steps in the same order, and each does its own part: it runs the
programs of stages on its devices, and the ends of transfers on its devices. An array without shards
represents an array that only other processes have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.errors import UsageError
from automesh_pipeline.runtime.split.arguments import Struct, bytes_per_device, is_same_layout

_SOCKET = "jax_cross_host_transfer_socket_address"
_TRANSPORTS = "jax_cross_host_transport_addresses"


class ArrayTransfers:
    """Moves arrays between submeshes.

    Attributes:
      spans: whether the submeshes belong to several processes.

    Args:
      meshes: the submeshes of all stages.
      is_run: whether programs will run on them; for absent devices `spans` is False.

    Raises:
      UsageError: this process has none of their devices, or transfers between processes are not
        possible.
    """

    def __init__(self, meshes: Sequence[Mesh], *, is_run: bool) -> None:
        self.meshes = tuple(dict.fromkeys(meshes))
        processes = {one.process_index for mesh in meshes for one in mesh.devices.flat}
        is_shared = is_run and jax.process_count() > 1
        if is_shared and jax.process_index() not in processes:
            raise UsageError(
                f"process {jax.process_index()} has no device of the pipeline's mesh, so that it "
                "has no part in it",
                hint="make the mesh of devices of every process",
            )
        self.spans = is_shared and len(processes) > 1
        self._placeholders: dict[Any, jax.Array] = {}
        self._routes: dict[Any, tuple[NamedSharding, ...]] = {}
        if self.spans:
            _check_processes(self.meshes)

    def is_here(self, mesh: Mesh) -> bool:
        """Whether this process has devices of a submesh."""
        return not self.spans or jax.process_index() in _processes(mesh)

    def placeholder(self, like: Struct) -> jax.Array:
        """Returns an array without shards, for one that only other processes have."""
        key = (like.shape, like.dtype, like.sharding)
        if key not in self._placeholders:
            self._placeholders[key] = jax.make_array_from_single_device_arrays(
                like.shape, cast("Sharding", like.sharding), [], dtype=like.dtype
            )
        return self._placeholders[key]

    def placeholders(self, tree: Any) -> Any:
        """Returns placeholders for all leaves of a tree."""
        return jax.tree.map(self.placeholder, tree)

    def move(self, array: Any, sharding: Any, *, is_overwritten: bool = False) -> Any:
        """Moves an array to another submesh, or to another layout on the same one.

        Args:
          is_overwritten: whether a later program takes over the array's memory.
        """
        if not self.spans:
            return jax.device_put(array, sharding)
        if is_overwritten and self.is_here(_mesh_of(array.sharding)):
            # Another process fetches the array at any later time (jax 0.10.2), perhaps after it was
            # overwritten.
            array = jax.numpy.copy(array)
        key = (array.shape, array.dtype, array.sharding, sharding)
        if key not in self._routes:
            self._routes[key] = _plan_route(array, sharding)
        for target in self._routes[key]:
            array = self._hop(array, target)
        return array

    def load(self, array: Any, sharding: Any) -> Any:
        """Puts an array that this process has on a submesh.

        Raises:
          UsageError: the array is spread over several processes, so it is not clear how to split
            it.
        """
        if not self.spans:
            return jax.device_put(array, sharding)
        if not self.is_here(_mesh_of(sharding)):
            struct = Struct(np.shape(array), jax.numpy.result_type(array), sharding=sharding)
            return self.placeholder(struct)
        host = on_host(array)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index], dtype=host.dtype
        )

    def tell(self, scalar: Any) -> Any:
        """Copies, if there are several processes, a scalar that is on every device of one submesh
        to every device of all submeshes. Otherwise returns it unchanged."""
        if not self.spans:
            return scalar
        copies = [self.move(scalar, NamedSharding(mesh, PartitionSpec())) for mesh in self.meshes]
        devices = np.concatenate([mesh.devices.flatten() for mesh in self.meshes])
        return jax.make_array_from_single_device_arrays(
            (),
            NamedSharding(Mesh(devices, ("device",)), PartitionSpec()),
            [shard.data for copy in copies for shard in copy.addressable_shards],
            dtype=scalar.dtype,
        )

    def _hop(self, array: jax.Array, target: NamedSharding) -> jax.Array:
        """Moves an array within a submesh, or to another submesh without a change of layout."""
        source, there = _mesh_of(array.sharding), _mesh_of(target)
        if not (self.is_here(source) or self.is_here(there)):
            return self.placeholder(Struct(array.shape, array.dtype, sharding=target))
        if source == there or _processes(source).isdisjoint(_processes(there)):
            return jax.device_put(array, target)
        return _copy_shards(array, target)


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Returns an array as a NumPy array.

    Raises:
      UsageError: this process does not have all of it.
    """
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        raise UsageError(
            f"an array of shape {list(array.shape)} is spread over several processes, and no "
            "process can split it for the stages",
            hint="give parameters and batches as arrays of the host, the same on every process",
        )
    return np.asarray(array)


def _copy_shards(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Copies each shard to the device with the same number, which belongs to the same process."""
    here = {shard.device: shard.data for shard in array.addressable_shards}
    source = _mesh_of(array.sharding)
    pairs = zip(source.devices.flat, _mesh_of(target).devices.flat, strict=True)
    return jax.make_array_from_single_device_arrays(
        array.shape,
        target,
        [jax.device_put(here[some], other) for some, other in pairs if some in here],
        dtype=array.dtype,
    )


def _plan_route(array: jax.Array, target: NamedSharding) -> tuple[NamedSharding, ...]:
    """Returns the shardings through which an array gets to its target.

    jax changes no layout during a transfer between processes, so this is done before or after it,
    such that the smaller shards are sent.
    """
    mesh, source = _mesh_of(array.sharding), cast("NamedSharding", array.sharding)
    if source.device_set == target.device_set or is_same_layout(source, target, array.shape):
        return (target,)
    some, other = (Struct(array.shape, array.dtype, sharding=one) for one in (source, target))
    if bytes_per_device(some) <= bytes_per_device(other):
        return (NamedSharding(target.mesh, source.spec), target)
    return (NamedSharding(mesh, target.spec), target)


def _mesh_of(sharding: Sharding) -> Mesh:
    if not isinstance(sharding, NamedSharding):
        raise UsageError(
            f"XLA has chosen {sharding} for an array of a pipeline on several processes, which no "
            "axes of its submesh say",
            hint="constrain the loss' parameters and values with PartitionSpecs",
        )
    return cast("Mesh", sharding.mesh)


def _processes(mesh: Mesh) -> frozenset[int]:
    return frozenset(one.process_index for one in mesh.devices.flat)


def _check_processes(meshes: Sequence[Mesh]) -> None:
    if len({mesh.abstract_mesh for mesh in meshes}) > 1:
        raise UsageError(
            "submeshes of different shapes are on several processes; between processes an array "
            "cannot go to another number of devices"
        )
    for some, other in itertools.combinations(meshes, 2):
        if _processes(some).isdisjoint(_processes(other)):
            _check_sockets(some.devices.flat[0])
        elif not _is_aligned(some, other):
            raise UsageError(
                f"two stages are on the processes {sorted(_processes(some))} and "
                f"{sorted(_processes(other))}, which is neither none in common nor the same for "
                "each pair of devices",
                hint="put the axis of the pipeline outermost, so that each process has whole "
                "stages, or innermost, so that it has its part of every stage",
            )


def _is_aligned(some: Mesh, other: Mesh) -> bool:
    pairs = zip(some.devices.flat, other.devices.flat, strict=True)
    return all(one.process_index == two.process_index for one, two in pairs)


def _check_sockets(device: Any) -> None:
    if getattr(device.client, "supports_cross_host_transfers", False):
        return
    address: str = jax.config.values[_SOCKET]
    # With port 0 the receiver waits for ever (jax 0.10.2).
    if not address or address.endswith(":0"):
        got = f"the address is {address!r}" if address else "no address is given for it"
        raise UsageError(
            f"stages on different processes of {device.platform} send through sockets, and {got}",
            hint=f'before jax.distributed.initialize: jax.config.update("{_SOCKET}", "HOST:PORT") '
            "with this process' own host, and a port of its own for each process; on several hosts "
            f'{_TRANSPORTS} as well, as "HOST:0,HOST:0,HOST:0,HOST:0"',
        )
