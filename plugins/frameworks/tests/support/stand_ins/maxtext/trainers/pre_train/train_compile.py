"""Abstract arguments of the step."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.utils.sharding import get_input_data_sharding


def get_shaped_inputs(mesh, config):
    inside = tuple(axis for axis in ("fsdp",) if axis in mesh.axis_names)
    hidden = "tensor" if "tensor" in mesh.axis_names else None
    shardings = {
        "up": NamedSharding(mesh, PartitionSpec(inside, hidden)),
        "down": NamedSharding(mesh, PartitionSpec(hidden, inside)),
    }
    shapes = {
        "up": (config.emb_dim, config.mlp_dim),
        "down": (config.mlp_dim, config.emb_dim),
    }
    state = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
        for name, shape in shapes.items()
    }
    batch = jax.ShapeDtypeStruct(
        (config.global_batch_size_to_train_on, config.emb_dim),
        jnp.float32,
        sharding=get_input_data_sharding(config, mesh),
    )
    return (state, batch), {}, shardings, None, None
