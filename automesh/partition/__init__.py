"""Maps logical axis names to mesh axes, as in Haliax, for Haliax, Flax and plain trees."""

from automesh.errors import IllegalMapping, UnknownMeshAxis
from automesh.partition.carriers import names_by_path
from automesh.partition.haliax_support import restore_removed_names
from automesh.partition.jitting import fsdp, named_jit
from automesh.partition.mapping import (
    axis_mapping,
    current_thread_local_mapping,
    mesh_context,
    set_mesh,
)
from automesh.partition.nouns import Axis, PhysicalAxisSpec, ResourceAxis, ResourceMapping
from automesh.partition.sharding import (
    auto_sharded,
    infer_resource_partitions,
    pspec_for,
    shard,
    shard_with_axis_mapping,
)
from automesh.partition.specs import (
    physical_axis_name,
    physical_axis_size,
    pspec_for_axis,
    round_axis_for_partitioning,
    sharding_for_axis,
)

restore_removed_names()

__all__ = [
    "Axis",
    "IllegalMapping",
    "PhysicalAxisSpec",
    "ResourceAxis",
    "ResourceMapping",
    "UnknownMeshAxis",
    "auto_sharded",
    "axis_mapping",
    "current_thread_local_mapping",
    "fsdp",
    "infer_resource_partitions",
    "mesh_context",
    "named_jit",
    "names_by_path",
    "physical_axis_name",
    "physical_axis_size",
    "pspec_for",
    "pspec_for_axis",
    "round_axis_for_partitioning",
    "set_mesh",
    "shard",
    "shard_with_axis_mapping",
    "sharding_for_axis",
]
