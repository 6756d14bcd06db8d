"""A program of `absl.app`: flags, one of them required, and an exit code."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Where to write.")
flags.DEFINE_integer("width", 128, "Width.")
flags.mark_flags_as_required(["workdir"])


def get_config():
    config = SimpleNamespace()
    config.learning_rate, config.batch_size, config.model_parallel = 0.1, 64, 2
    return config


def train(config, workdir):
    mesh = jax.make_mesh(
        (jax.device_count() // config.model_parallel, config.model_parallel),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))
    rng, d = np.random.default_rng(0), FLAGS.width
    params = {
        "up": place(0.05 * rng.standard_normal((d, 4 * d), np.float32), None, "model"),
        "down": place(0.05 * rng.standard_normal((4 * d, d), np.float32), "model", None),
    }

    @jax.jit
    def train_step(params, x):
        loss, g = jax.value_and_grad(
            lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)
        )(params)
        return jax.tree.map(lambda w, q: w - config.learning_rate * q, params, g), loss

    for step in range(10**6):
        params, loss = train_step(
            params, place(rng.standard_normal((config.batch_size, d), np.float32), "data")
        )
        logging.info("step %d loss %.5f", step, float(loss))
    return 0


def main(argv):
    if len(argv) > 1:
        raise app.UsageError("Too many command-line arguments.")
    sys.exit(train(get_config(), FLAGS.workdir))


if __name__ == "__main__":
    jax.config.config_with_absl()
    app.run(main)
