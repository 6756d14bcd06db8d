"""nnx the functional way: a graph without arrays, and a state of abstract arrays."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def create():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(graph, state, x):
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def build(mesh):
    graph, state = nnx.split(nnx.eval_shape(create))

    def place(leaf):
        spec = P(None, "tp") if leaf.shape == (16, 64) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return jax.jit(step, donate_argnums=1), (graph, jax.tree.map(place, state), x)
