"""`shard_map`: what each device does is written out, with a psum over one axis of the mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, "tp"), P("tp", None), P("dp", None)),
        out_specs=P("dp", None),
    )
    def forward(up, down, x):
        return jax.lax.psum(jax.nn.relu(x @ up) @ down, "tp")

    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((forward(*w, x) - x) ** 2))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    w = struct((16, 32), None, "tp"), struct((32, 16), "tp", None)
    return jax.jit(step, donate_argnums=0), (w, struct((8, 16), "dp"))
