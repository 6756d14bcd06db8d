"""A library defines flags of absl for the script, as mlxu does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FLAGS = flags.FLAGS
flags.DEFINE_flag(
    flags.Flag(flags.IntegerParser(), flags.ArgumentSerializer(), "seed", 42, "of the data"),
    module_name="numpy",
)


@partial(jax.jit, donate_argnums=0)
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def main(_):
    mesh = jax.make_mesh(
        (jax.device_count(), 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    w = jax.device_put(
        jnp.full((256, 256), 0.01, jnp.float32), NamedSharding(mesh, P(None, "model"))
    )
    for step in range(10):
        rows = np.random.default_rng([FLAGS.seed, step]).normal(size=(64, 256)).astype(np.float32)
        w, loss = train_step(w, jax.device_put(rows, NamedSharding(mesh, P("data", None))))
        print(step, float(loss))


if __name__ == "__main__":
    app.run(main)
