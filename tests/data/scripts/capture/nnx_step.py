"""Flax NNX: a model and an optimizer that `nnx.jit` updates in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("fsdp", "tensor"))


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit
def create_model():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    for module in (model, optimizer):
        state = nnx.state(module)
        nnx.update(module, jax.tree.map(constrain, state))
    return model, optimizer


def constrain(array):
    spec = P("fsdp", "tensor") if array.ndim == 2 else P()
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model, optimizer = create_model()
rng = np.random.default_rng(0)
rows = NamedSharding(mesh, P("fsdp"))
for step in range(5):
    batch = {"x": rng.random((16, 32), np.float32), "y": rng.random((16, 8), np.float32)}
    loss = train_step(model, optimizer, jax.device_put(batch, rows))
    print(step, loss)
