"""A Trainer class whose step is a jitted method, `self` being static."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Trainer:
    def __init__(self, mesh, rate):
        self.mesh = mesh
        self.tx = optax.sgd(rate)

    def abstract(self, shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(self.mesh, P(*spec)))

    def loss(self, params, x):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def train_step(self, state, x, accumulate):
        params, opt_state = state
        loss, grads = jax.value_and_grad(self.loss)(params, x)
        if accumulate:
            grads = jax.tree.map(lambda g: g / 2, grads)
        updates, opt_state = self.tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def build(mesh):
    trainer = Trainer(mesh, rate=0.1)
    params = {
        "up": trainer.abstract((16, 32), None, "tp"),
        "down": trainer.abstract((32, 16), "tp", None),
    }
    state = params, jax.eval_shape(trainer.tx.init, params)
    return trainer.train_step, (state, trainer.abstract((8, 16), "dp"), True)
