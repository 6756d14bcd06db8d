"""An Equinox model with functions and a dropout rate among its leaves, under `filter_jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    scale: float

    def __call__(self, x, key):
        return self.scale * self.drop(self.mlp(x), key=key)


def build(mesh):
    tx = optax.adam(1e-2)

    def create():
        mlp = eqx.nn.MLP(16, 16, 64, depth=1, key=jax.random.key(0))
        net = Net(mlp, eqx.nn.Dropout(0.1), 1.0)
        return net, tx.init(eqx.filter(net, eqx.is_inexact_array))

    def place(leaf):
        if not eqx.is_array_like(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if isinstance(leaf, (bool, float)):
            return leaf
        spec = P("tp") if leaf.shape[:1] == (64,) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    @eqx.filter_jit(donate="all-except-first")
    def step(x, key, net, opt_state):
        def loss_of(net):
            keys = jax.random.split(key, len(x))
            return jnp.mean((jax.vmap(net)(x, keys) - x) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_of)(net)
        updates, opt_state = tx.update(grads, opt_state)
        return loss, key, eqx.apply_updates(net, updates), opt_state

    net, opt_state = jax.tree.map(place, eqx.filter_eval_shape(create))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(mesh, P()))
    return step, (x, key, net, opt_state)
