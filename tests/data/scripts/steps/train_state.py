"""A Flax TrainState made inside `build`: its optimizer and `apply_fn` are new at every call."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.relu(nn.Dense(64)(x)))


def build(mesh):
    def place(leaf):
        spec = P(None, "tp") if jnp.shape(leaf)[1:] == (64,) else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 16)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda count: 1e-2))
    state = TrainState.create(apply_fn=lambda p, x: net.apply(p, x), params=params, tx=tx)
    state = jax.tree.map(place, state)

    @jax.jit
    def step(state, x):
        def loss_of(params):
            return jnp.mean((state.apply_fn(params, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return step, (state, x)
