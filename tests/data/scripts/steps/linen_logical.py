"""Linen modules whose parameters have logical axes, and the rules that map these to the mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

RULES = (("batch", "dp"), ("embed", None), ("mlp", "tp"))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = self.param("up", nn.with_logical_partitioning(init, ("embed", "mlp")), (16, 64))
        down = self.param("down", nn.with_logical_partitioning(init, ("mlp", "embed")), (64, 16))
        hidden = nn.with_logical_constraint(nn.relu(x @ up), ("batch", "mlp"))
        return hidden @ down


def build(mesh):
    net = Net()
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    boxed = jax.eval_shape(net.init, jax.random.key(0), x)
    specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    params = jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        nn.unbox(boxed),
        specs,
    )

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return automesh.Workload(
        jax.jit(step, donate_argnums=0),
        (params, x),
        context=lambda: nn.logical_axis_rules(RULES),
    )
