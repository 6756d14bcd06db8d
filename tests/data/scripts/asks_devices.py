"""A step that looks at the devices when it is loaded, built and traced."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import default_backend, devices
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

DTYPE = jnp.bfloat16 if default_backend() == "tpu" else jnp.float32


@dataclass(frozen=True)
class Settings:
    """Chosen from what the devices are."""

    chunks: int
    precise: bool


def choose():
    kind = devices()[0].device_kind
    return Settings(chunks=4 if kind == "TPU v5 lite" else 2, precise="H100" in kind)


def build(mesh, width=32):
    settings = choose()
    data = NamedSharding(mesh, P("dp", None))
    weights = jax.ShapeDtypeStruct(
        (width, width), DTYPE, sharding=NamedSharding(mesh, P(None, "tp"))
    )
    batch = jax.ShapeDtypeStruct((64, width), DTYPE, sharding=data)

    def step(weights, batch):
        hidden = batch
        # Every host does its share, which only counts here.
        for _ in range(settings.chunks * jax.process_count()):
            hidden = jnp.tanh(hidden @ weights)
        if jax.default_backend() == "gpu":
            hidden = hidden * jax.device_count()
        loss = jnp.mean(hidden.astype(jnp.float32 if settings.precise else DTYPE))
        return weights - loss.astype(DTYPE), loss

    return step, (weights, batch)
