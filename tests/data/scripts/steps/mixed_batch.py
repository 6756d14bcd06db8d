"""A plain function, not jitted, whose batch carries the name of its data set and a function."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(w, batch):
    assert batch["name"] == "train"
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(batch["activation"](batch["x"] @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    batch = {"x": struct((8, 16), "dp"), "name": "train", "activation": lambda x: jnp.tanh(x)}
    return step, (struct((16, 32), None, "tp"), batch)
