"""A Pallas kernel in interpret mode, inside of a manual region."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def _scale(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...] + 1


def build(mesh):
    def kernel(x):
        return pl.pallas_call(
            _scale, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x)

    scaled = jax.shard_map(
        kernel, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"), check_vma=False
    )

    def step(w, x):
        y = scaled(x @ w)
        return w - 1e-3 * x.T @ y, jnp.mean(y)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(step, donate_argnums=0), (struct((16, 32), None, "tp"), struct((8, 16), "dp"))
