"""An nnx model and its optimizer, both changed in place by a step that `nnx.jit` has made."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, x):
    def loss_of(model):
        return jnp.mean((model(x) - x) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def build(mesh):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for owner in (model, optimizer):
        state = nnx.state(owner)
        nnx.update(owner, jax.device_put(state, NamedSharding(mesh, P())))
    up = model.up.kernel
    up[...] = jax.device_put(up[...], NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return step, (model, optimizer, x)
