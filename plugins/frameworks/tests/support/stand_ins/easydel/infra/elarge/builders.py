"""What a loader is called with."""

import jax.numpy as jnp

from easydel.infra.elarge.processing import normalize

_TYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def to_from_pretrained_kwargs(settings):
    settings = normalize(settings)
    loader, sharding = settings["loader"], settings["sharding"]
    platform = settings.get("platform", {})
    dcn = sharding.get("dcn_axis_dims")
    return {
        "dtype": _TYPES[loader["dtype"]],
        "param_dtype": _TYPES[loader["param_dtype"]],
        "precision": loader.get("precision"),
        "sharding_axis_dims": tuple(sharding["axis_dims"]),
        "sharding_dcn_axis_dims": tuple(dcn) if dcn else None,
        "sharding_axis_names": tuple(sharding["axis_names"]),
        "partition_axis": sharding.get("partition_axis"),
        "backend": platform.get("backend"),
        "platform": platform.get("platform"),
        "config_kwargs": dict(settings["base_config"].get("values") or {}),
    }
