"""Nested dicts and lists of abstract arrays, and optax."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        "layers": [{"w": struct((16, 32), None, "tp"), "b": struct((32,), "tp")}],
        "head": {"w": struct((32, 4), "tp", None), "scale": struct(())},
    }
    tx = optax.adamw(1e-2)
    opt_state = jax.eval_shape(tx.init, params)

    def loss_of(params, batch):
        hidden = batch["x"]
        for layer in params["layers"]:
            hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
        logits = hidden @ params["head"]["w"] * params["head"]["scale"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    labels = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    batch = {"x": struct((8, 16), "dp"), "y": labels}
    return jax.jit(step, donate_argnums=(0, 1)), (params, opt_state, batch)
