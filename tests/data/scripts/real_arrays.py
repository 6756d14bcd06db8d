"""What puts arrays on the devices instead of describing them, in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def _sharding(mesh):
    return NamedSharding(mesh, P("dp"))


def placed(mesh):
    return jnp.sum, (jax.device_put(np.ones(64, np.float32), _sharding(mesh)),)


def computed(mesh):
    make = jax.jit(lambda: jnp.ones(64), out_shardings=_sharding(mesh))
    return jnp.sum, (make(),)


def created(mesh):
    return jnp.sum, (jnp.ones(64, device=_sharding(mesh)),)


def from_callback(mesh):
    whole = np.ones(64, np.float32)
    return jnp.sum, (
        jax.make_array_from_callback((64,), _sharding(mesh), lambda index: whole[index]),
    )


def on_one(mesh):
    return jnp.sum, (jax.device_put(1.0, jax.devices()[0]),)


def on_the_host(mesh):
    """Arrays that nobody puts anywhere are fine."""
    described = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=_sharding(mesh))
    return lambda x, y: x * y, (described, jnp.float32(2.0))
