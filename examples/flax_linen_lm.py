"""A decoder language model in Flax Linen with logical axes, trained on the bytes of Paradise Lost.

Search for the mesh and the rules of the logical axes together, then train on what was found:

    cd examples
    automesh search flax_linen_lm.py --target cpu:8 --space flax_lm.toml
    python flax_linen_lm.py --devices 8

Nothing in the model or in the step knows automesh: parameters are made by
`nn.with_logical_partitioning`, activations are held by `nn.with_logical_constraint`, and
`nn.logical_axis_rules` says what the names mean. `build` takes the rules as an argument.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from lm import mapped, text

import automesh

ROWS, LENGTH, VOCAB = 16, 32, 256
EMBED, MLP, HEADS, LAYERS = 48, 192, 4, 2
MAPPING = {
    "batch": ("dp", "fsdp"),
    "embed": "fsdp",
    "mlp": "tp",
    "heads": "tp",
    "vocab": "tp",
}


def dense(features: int, names: tuple[str, str], name: str) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.Dense(features, use_bias=False, kernel_init=init, name=name)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(name: str) -> jax.Array:
            projected = dense(EMBED, ("embed", "heads"), name)(x)
            per_head = projected.reshape(*x.shape[:2], HEADS, -1)
            return nn.with_logical_constraint(per_head, ("batch", "seq", "heads", None))

        attended = jax.nn.dot_product_attention(
            heads("query"), heads("key"), heads("value"), is_causal=True
        )
        attended = nn.with_logical_constraint(attended, ("batch", "seq", "heads", None))
        return dense(EMBED, ("heads", "embed"), "out")(attended.reshape(x.shape))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention()(nn.RMSNorm()(x))
        x = nn.with_logical_constraint(x, ("batch", "seq", None))
        hidden = nn.gelu(dense(MLP, ("embed", "mlp"), "up")(nn.RMSNorm()(x)))
        hidden = nn.with_logical_constraint(hidden, ("batch", "seq", "mlp"))
        x = x + dense(EMBED, ("mlp", "embed"), "down")(hidden)
        return nn.with_logical_constraint(x, ("batch", "seq", None))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        def table(size: int, names: tuple[str | None, str], name: str) -> nn.Embed:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.02), names)
            return nn.Embed(size, EMBED, embedding_init=init, name=name)

        x = table(VOCAB, ("vocab", "embed"), "tokens")(inputs)
        x = x + table(LENGTH, (None, "embed"), "places")(jnp.arange(LENGTH))
        x = nn.with_logical_constraint(x, ("batch", "seq", None))
        for _ in range(LAYERS):
            x = Block()(x)
        logits = dense(VOCAB, ("embed", "vocab"), "head")(nn.RMSNorm()(x))
        return nn.with_logical_constraint(logits, ("batch", "seq", "vocab"))


# Made once: both are static parts of every state, and one made anew equals no other.
MODEL = Decoder()
OPTIMIZER = optax.adamw(3e-3)


def initial_state() -> TrainState:
    variables = MODEL.init(jax.random.key(0), jnp.zeros((ROWS, LENGTH), jnp.int32))
    return TrainState.create(apply_fn=MODEL.apply, params=variables["params"], tx=OPTIMIZER)


def train_step(
    state: TrainState, inputs: jax.Array, targets: jax.Array
) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def batch_of(rows: mapped.Rows) -> tuple[Any, ...]:
    return rows["inputs"], rows["targets"]


def build(mesh: jax.sharding.Mesh, mapping: dict[str, Any] = MAPPING) -> automesh.Workload:
    """The training step and its arguments on `mesh`: what `automesh search` compiles and measures.

    Args:
      mesh: has the axes of the search space.
      mapping: logical axis -> mesh axes; None where it is not split.
    """
    jax.set_mesh(mesh)  # In force while the step is traced and run.
    rules = tuple(mapping.items())

    def under_rules(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with nn.logical_axis_rules(rules):
                return function(*args)

        return call

    boxed = jax.eval_shape(under_rules(initial_state))
    logical = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    state = jax.tree.map(
        lambda where, box: jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), box
        ),
        shardings,
        boxed,
    )
    rows = jax.sharding.NamedSharding(mesh, nn.logical_to_mesh_axes(("batch",), rules))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=rows)
    return automesh.Workload(
        step=jax.jit(under_rules(train_step), donate_argnums=0),
        args=(state, tokens, tokens),
        init=lambda _: (
            jax.jit(under_rules(initial_state), out_shardings=shardings)(),
            *jax.device_put(batch_of(next(text.batches(ROWS, LENGTH))), rows),
        ),
        facts={"batch": ROWS, "seq": LENGTH},
        tokens_per_step=ROWS * LENGTH,
    )


if __name__ == "__main__":
    mapped.train(build, batch_of, __file__)
