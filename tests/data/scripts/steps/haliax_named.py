"""Haliax: named arrays, a mapping of their axes, and `named_jit`."""

import equinox as eqx
import haliax as hax
import jax
import optax

import automesh

Batch, Embed, Mlp = hax.Axis("batch", 8), hax.Axis("embed", 16), hax.Axis("mlp", 64)
MAPPING = {"batch": "dp", "mlp": "tp"}


class Net(eqx.Module):
    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(key):
        up, down = jax.random.split(key)
        return Net(hax.nn.Linear.init(Embed, Mlp, key=up), hax.nn.Linear.init(Mlp, Embed, key=down))

    def __call__(self, x):
        return self.down(hax.nn.relu(self.up(x)))


def build(mesh):
    tx = optax.sgd(0.1, momentum=0.9)

    @hax.named_jit(axis_resources=MAPPING, donate_args=(True, True, False))
    def step(net, opt_state, x):
        loss, grads = eqx.filter_value_and_grad(lambda n: ((n(x) - x) ** 2).mean().scalar())(net)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(net, updates), opt_state, loss

    with jax.set_mesh(mesh), hax.axis_mapping(MAPPING):
        net = hax.shard(Net.init(jax.random.key(0)), MAPPING)
        x = hax.shard(hax.ones((Batch, Embed)), MAPPING)
        opt_state = hax.shard(tx.init(eqx.filter(net, eqx.is_inexact_array)), MAPPING)
    return automesh.Workload(step, (net, opt_state, x), context=lambda: jax.set_mesh(mesh))
