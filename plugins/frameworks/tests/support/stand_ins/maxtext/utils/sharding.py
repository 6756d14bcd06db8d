"""Shardings of batch, parameters and optimizer state."""

from jax.sharding import NamedSharding, PartitionSpec


def get_input_data_sharding(config, mesh):
    rows = tuple(axis for axis in ("data", "fsdp", "expert") if axis in mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(rows))


def maybe_update_params_sharding_with_opt(config, shardings):
    return shardings, shardings


def build_zero1_input_state_mesh_shardings(config, shardings, params):
    return shardings
