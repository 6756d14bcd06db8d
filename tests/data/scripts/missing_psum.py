"""A tensor-parallel layer in shard_map that forgets to sum over `tp`: right for dp alone."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def build(mesh):
    def layer(x, up, down):
        # A `jax.lax.psum(..., "tp")` around this is missing.
        return jnp.tanh(x @ up) @ down

    sharded = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(P("dp"), P(None, "tp"), P("tp")),
        out_specs=P("dp"),
        check_vma=False,
    )

    def step(params, x, y):
        def loss_of(params):
            return jnp.mean((sharded(x, *params) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = (struct((32, 64), None, "tp"), struct((64, 8), "tp"))
    return jax.jit(step, donate_argnums=0), (params, struct((16, 32), "dp"), struct((16, 8), "dp"))
