"""A model of 200 GB of parameters and as much again twice: no machine for tests could hold it."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(jax.devices(), ("fsdp",))
mesh = Mesh(mesh.devices.reshape(-1, 1), ("fsdp", "tp"))
WIDTH, LAYERS = 16384, 96
shapes = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
specs = {"up": P(None, "fsdp", "tp"), "down": P(None, "tp", "fsdp")}
optimizer = optax.adamw(1e-4)


def init(key):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape, jnp.bfloat16) * 0.01
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(params, batch):
    def layer(x, weights):
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    out, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
    return jnp.mean(jnp.square(out).astype(jnp.float32))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
params = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
opt_state = optimizer.init(params)
count = sum(leaf.size for leaf in jax.tree.leaves(params))
print(f"{count / 1e9:.1f} billion parameters")
for step in range(10):
    batch = jnp.ones((512, WIDTH), jnp.bfloat16) * (step + 1)
    batch = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
    params, opt_state, loss = train_step(params, opt_state, batch)
    print(f"step {step}: loss {float(loss):.3f}")
