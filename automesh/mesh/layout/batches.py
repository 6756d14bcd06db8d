"""Moves rows of a batch between the hosts that read them and the devices of a mesh (jax).

`DataPartitionType` and the functions are those of Loadax's `sharding.placement` and
`sharding.partition_spec`. They use the given mesh, or the one in force.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.mesh.layout.context import need_mesh
from automesh.mesh.names import as_names

Index = tuple[slice, ...]


class DataPartitionType(enum.Enum):
    """The ways in which the parts of the hosts form the whole batch."""

    FULL = "full"
    """Each host has its own rows; together, in the order of the mesh, they are the batch."""
    REPLICATED = "replicated"
    """Every host has the whole batch, and every device gets it."""


def input_partition_spec(
    *, mesh: Mesh | None = None, batch_axis_names: str | Sequence[str] | None = None
) -> PartitionSpec:
    """Returns the spec that splits the rows of a batch over the axes of the mesh in force.

    Args:
      mesh: default: that of `jax.set_mesh` or of a legacy `with mesh:`.
      batch_axis_names: axes that split the rows, such as `MeshConfig.batch_axis_names`; default:
        all of them.

    Raises:
      UsageError: no mesh, or an axis that it does not have.
      WrongType: an argument of the wrong type; also a `TypeError`.

    Example:
      >>> from automesh import create_mesh
      >>> mesh = create_mesh((4, 2), ("data", "model"))
      >>> input_partition_spec(mesh=mesh) == PartitionSpec(("data", "model"))
      True
      >>> input_partition_spec(mesh=mesh, batch_axis_names="data") == PartitionSpec("data")
      True
    """
    names = need_mesh(mesh, what="input_partition_spec").axis_names
    if batch_axis_names is None:
        return PartitionSpec(names)
    wanted = (
        (batch_axis_names,)
        if isinstance(batch_axis_names, str)
        else as_names(batch_axis_names, "`batch_axis_names`")
    )
    for name in wanted:
        if name not in names:
            known = did_you_mean(name, names) or f"; it has {', '.join(names)}"
            raise UsageError(
                f"batch axis `{name}` is not an axis of the mesh{known}",
                hint="give axes of the mesh, or leave `batch_axis_names` out for all of them",
            )
    if len(set(wanted)) < len(wanted):
        raise UsageError(
            f"batch axes must be distinct, got {list(wanted)}", hint="leave one of them out"
        )
    return PartitionSpec(wanted)


def host_to_global_device_array(
    host_arrays: Any,
    *,
    partition: DataPartitionType = DataPartitionType.FULL,
    mesh: Mesh | None = None,
    batch_axis_names: str | Sequence[str] | None = None,
) -> Any:
    """Puts each host's part of a batch on its devices, as global arrays; every host must call it.

    Args:
      host_arrays: a tree of arrays in host memory. FULL: [rows of this host, ...], as many rows on
        every host; hosts whose devices hold the same rows of the batch pass equal ones. REPLICATED:
        [...], equal on every host.
      partition: how the parts form the whole.
      mesh: default: that of `jax.set_mesh` or of a legacy `with mesh:`.
      batch_axis_names: axes that split the rows (FULL); default: all of the mesh.

    Returns:
      The same tree of `jax.Array`s. FULL: [rows of all hosts, ...], split over the batch axes;
      REPLICATED: a copy on each device.

    Raises:
      UsageError: no mesh, no device of this host in it, or rows that its devices cannot share
        equally; names the leaf.
      WrongType: a leaf that is no array or traced, or an argument of the wrong type.

    Example:
      >>> from automesh import create_mesh
      >>> mesh = create_mesh((4, 2), ("data", "model"))
      >>> tokens = np.arange(32).reshape(16, 2)
      >>> placed = host_to_global_device_array({"tokens": tokens}, mesh=mesh)
      >>> placed["tokens"].addressable_data(0).shape
      (2, 2)
    """
    _check_partition(partition)
    chosen = need_mesh(mesh, what="host_to_global_device_array")
    if not chosen.local_devices:
        raise UsageError(
            f"the mesh has no device of process {jax.process_index()}, so that it cannot place "
            "its part of the batch",
            hint="make the mesh of the devices of all processes",
        )
    if partition is DataPartitionType.REPLICATED:
        spec, place = PartitionSpec(), _replicate
    else:
        spec = input_partition_spec(mesh=chosen, batch_axis_names=batch_axis_names)
        place = _split_rows
    sharding = NamedSharding(chosen, spec)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(_host_array(path, leaf), sharding, _where(path)),
        host_arrays,
    )


def global_to_host_array(
    global_arrays: Any, *, partition: DataPartitionType = DataPartitionType.FULL
) -> Any:
    """Returns this host's part of global arrays; the inverse of `host_to_global_device_array`.

    Args:
      global_arrays: a tree of `jax.Array`s, split along their first dimension at most.
      partition: FULL takes the rows on this host's devices, each once, in their order; REPLICATED
        takes arrays that every device holds whole.

    Returns:
      The same tree of numpy arrays: [rows of this host, ...] or the whole array.

    Raises:
      UsageError: an array that is split in another way; names the leaf.
      WrongType: a leaf that is no `jax.Array` or traced, or `partition` no `DataPartitionType`.

    Example:
      >>> from automesh import create_mesh
      >>> placed = host_to_global_device_array(np.arange(8), mesh=create_mesh((8,), ("data",)))
      >>> global_to_host_array(placed).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _check_partition(partition)
    fetch = _local_rows if partition is DataPartitionType.FULL else _whole
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fetch(_global_array(path, leaf), _where(path)),
        global_arrays,
    )


def _check_partition(partition: object) -> None:
    if not isinstance(partition, DataPartitionType):
        raise WrongType(
            f"`partition` must be a DataPartitionType, got {kind_of(partition)}: {partition!r}",
            hint="use DataPartitionType.FULL or DataPartitionType.REPLICATED",
        )


def _host_array(path: Any, leaf: Any) -> np.ndarray:
    _check_here(path, leaf, "host_to_global_device_array")
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    array = np.empty(0, object) if is_global or is_key else np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise WrongType(
            f"leaf `{_where(path)}` of the batch is {kind_of(leaf)}, not an array of numbers "
            "in host memory",
            hint="leave out of the batch what does not go on the devices",
        )
    # jax converts arrays of 64 bits to 32, but not the shards that a callback returns.
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _global_array(path: Any, leaf: Any) -> jax.Array:
    if not isinstance(leaf, jax.Array):
        raise WrongType(
            f"leaf `{_where(path)}` is {kind_of(leaf)}, not a jax.Array",
            hint="pass what `host_to_global_device_array` or a jitted function has returned",
        )
    _check_here(path, leaf, "global_to_host_array")
    return leaf


def _check_here(path: Any, leaf: object, what: str) -> None:
    if isinstance(leaf, Tracer):
        raise WrongType(
            f"leaf `{_where(path)}` is traced: `{what}` moves data between host and devices, which "
            "nothing inside a jitted or otherwise transformed function can",
            hint="call it before or after that function, on what goes in or comes out",
        )


def _replicate(array: np.ndarray, sharding: NamedSharding, _: str) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _split_rows(array: np.ndarray, sharding: NamedSharding, where: str) -> jax.Array:
    if not array.ndim:
        raise UsageError(
            f"leaf `{where}` of the batch is a scalar: it has no rows to split",
            hint="place it with DataPartitionType.REPLICATED",
        )
    # Finds the blocks of rows of this host, with an array that has one row in each block.
    blocks = _blocks(sharding)
    indices = sharding.addressable_devices_indices_map((blocks,)).values()
    place = {block: at for at, block in enumerate(sorted({_start(index) for index in indices}))}
    rows = array.shape[0]
    if not rows or rows % len(place):
        raise UsageError(
            f"leaf `{where}` of the batch has {rows} rows of this host, which its {len(place)} "
            f"blocks of the mesh cannot share equally",
            hint=f"pass a multiple of {len(place)} rows, or split over fewer axes with "
            "`batch_axis_names`",
        )
    each = rows // len(place)

    def shard(index: Index | None) -> np.ndarray:
        at = place[_start(index) // each]
        return array[at * each : (at + 1) * each]

    shape = (each * blocks, *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, shard)


def _blocks(sharding: NamedSharding) -> int:
    """Counts the parts of the first dimension."""
    return sharding.mesh.size // sharding.shard_shape((sharding.mesh.size,))[0]


def _start(index: Index | None) -> int:
    return (index[0].start or 0) if index else 0


def _local_rows(array: jax.Array, where: str) -> np.ndarray:
    if not array.ndim:
        raise UsageError(
            f"leaf `{where}` is a scalar: it has no rows",
            hint="fetch it with DataPartitionType.REPLICATED",
        )
    blocks: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        split = [
            dimension
            for dimension in range(1, array.ndim)
            if shard.data.shape[dimension] != array.shape[dimension]
        ]
        if split:
            raise UsageError(
                f"leaf `{where}` of shape {array.shape} is split along dimension {split[0]}; "
                "only the first may be",
                hint="reshard it to `input_partition_spec()` before",
            )
        blocks[_start(shard.index)] = shard.data
    if not blocks:
        raise UsageError(f"leaf `{where}` has no part on process {jax.process_index()}")
    return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def _whole(array: jax.Array, where: str) -> np.ndarray:
    if not array.is_fully_replicated:
        raise UsageError(
            f"leaf `{where}` of shape {array.shape} is split, not replicated",
            hint="use DataPartitionType.FULL for an array that is split by rows",
        )
    return np.asarray(array.addressable_data(0))


def _where(path: Any) -> str:
    return jax.tree_util.keystr(path) or "batch"
