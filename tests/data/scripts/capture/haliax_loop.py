"""A training loop in the style of Haliax's tutorial: named axes, `named_jit`, an axis mapping."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax.partitioning import ResourceAxis
from jax.sharding import Mesh

Batch = hax.Axis("batch", 32)
Embed = hax.Axis("embed", 32)
Mlp = hax.Axis("mlp", 64)
Out = hax.Axis("out", 8)

mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), (ResourceAxis.DATA, ResourceAxis.MODEL))
param_mapping = {"embed": ResourceAxis.DATA, "mlp": ResourceAxis.MODEL}
compute_mapping = {"batch": ResourceAxis.DATA, "mlp": ResourceAxis.MODEL}


class Net(eqx.Module):
    """Two layers."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key):
        up, down = jax.random.split(key)
        return Net(
            hnn.Linear.init(In=Embed, Out=Mlp, key=up, use_bias=False),
            hnn.Linear.init(In=Mlp, Out=Out, key=down, use_bias=False),
        )

    def __call__(self, x):
        return self.down(hax.shard(hnn.gelu(self.up(x))))


optimizer = optax.adam(1e-3)


@hax.named_jit(axis_resources=param_mapping)
def init():
    model = Net.init(jax.random.PRNGKey(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_array))


@hax.named_jit(axis_resources=param_mapping, donate_args=(True, True, False, False))
def train_step(model, opt_state, x, y):
    def loss_fn(model):
        with hax.axis_mapping(compute_mapping):
            error = model(hax.shard(x)) - hax.shard(y)
            return hax.mean(error * error).scalar()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = optimizer.update(grads, opt_state, params=model)
    return eqx.apply_updates(model, updates), opt_state, loss


with mesh, hax.axis_mapping(param_mapping):
    model, opt_state = init()
    rng = np.random.default_rng(0)
    for step in range(6):
        x = hax.named(jnp.asarray(rng.random((32, 32), np.float32)), (Batch, Embed))
        y = hax.named(jnp.asarray(rng.random((32, 8), np.float32)), (Batch, Out))
        with hax.axis_mapping(compute_mapping, merge=False):
            x, y = hax.shard(x), hax.shard(y)
        model, opt_state, loss = train_step(model, opt_state, x, y)
        print(f"step {step}: {float(loss):.4f}")
