"""LoRA: two thin matrices beside each one that is named."""

import re

import jax.numpy as jnp
from flax import nnx


def apply_lora_to_model(base_model, mesh, lora_config):
    assert mesh is None
    for name in ("up", "down"):
        if not re.fullmatch(lora_config["module_path"], name):
            continue
        weight = getattr(base_model, name)
        rows, columns = weight.shape
        split = weight.get_metadata("out_sharding")
        rank = lora_config["rank"]
        dtype = weight.dtype
        first = nnx.LoRAParam(jnp.ones((rows, rank), dtype), out_sharding=(split[0], None))
        second = nnx.LoRAParam(jnp.zeros((rank, columns), dtype), out_sharding=(None, split[1]))
        setattr(base_model, f"{name}_lora_a", first)
        setattr(base_model, f"{name}_lora_b", second)
    return base_model
