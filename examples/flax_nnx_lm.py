"""A decoder language model in Flax NNX with logical axes, trained on the bytes of Paradise Lost.

Search for the mesh and the rules of the logical axes together, then train on what was found:

    cd examples
    automesh search flax_nnx_lm.py --target cpu:8 --space flax_lm.toml
    python flax_nnx_lm.py --devices 8

Nothing in the model or in the step knows automesh: weights carry the names of their axes as Flax
metadata, and `nnx.logical_axis_rules` says what these mean. `build` takes the rules as an argument.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.core.spmd import get_pspec
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


def split(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation to what the rules say of its logical axes."""
    return jax.lax.with_sharding_constraint(x, get_pspec(names))


def linear(inputs: int, outputs: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_metadata={"out_sharding": names}, rngs=rngs
    )


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = linear(EMBED, EMBED, ("embed", "heads"), rngs)
        self.key = linear(EMBED, EMBED, ("embed", "heads"), rngs)
        self.value = linear(EMBED, EMBED, ("embed", "heads"), rngs)
        self.out = linear(EMBED, EMBED, ("heads", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(projected: jax.Array) -> jax.Array:
            return split(projected.reshape(*x.shape[:2], HEADS, -1), "batch", None, "heads")

        query, key, value = (heads(one(x)) for one in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(split(attended, "batch", None, "heads").reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.RMSNorm(EMBED, rngs=rngs), nnx.RMSNorm(EMBED, rngs=rngs)
        self.attention = Attention(rngs)
        self.up = linear(EMBED, MLP, ("embed", "mlp"), rngs)
        self.down = linear(MLP, EMBED, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = split(x + self.attention(self.norm_1(x)), "batch")
        hidden = split(nnx.gelu(self.up(self.norm_2(x))), "batch", None, "mlp")
        return split(x + self.down(hidden), "batch")


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        metadata = {"out_sharding": ("vocab", "embed")}
        self.tokens = nnx.Embed(VOCAB, EMBED, embedding_metadata=metadata, rngs=rngs)
        self.places = nnx.Embed(
            LENGTH, EMBED, embedding_metadata={"out_sharding": (None, "embed")}, rngs=rngs
        )
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = linear(EMBED, VOCAB, ("embed", "vocab"), rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = split(self.tokens(inputs) + self.places(jnp.arange(LENGTH)), "batch")
        for block in self.blocks:
            x = block(x)
        return split(self.head(self.norm(x)), "batch", None, "vocab")


class Training(nnx.Module):
    """The model with its optimizer."""

    def __init__(self) -> None:
        self.model = Decoder(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(3e-3), wrt=nnx.Param)


def train_step(training: Training, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    def loss_of(model: Decoder) -> jax.Array:
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(training.model)
    training.optimizer.update(training.model, gradients)
    return loss


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

    def in_parts() -> tuple[nnx.GraphDef[Training], nnx.State]:
        with nnx.logical_axis_rules(rules):
            return nnx.split(Training())

    with nnx.logical_axis_rules(rules):
        graph, state = nnx.get_abstract_model(Training, mesh)
        rows = jax.sharding.NamedSharding(mesh, get_pspec(("batch",)))

    @jax.jit(donate_argnums=0)
    def step(state: nnx.State, inputs: jax.Array, targets: jax.Array) -> tuple[nnx.State, Any]:
        with nnx.logical_axis_rules(rules):
            training = nnx.merge(graph, state)
            loss = train_step(training, inputs, targets)
        return nnx.state(training), loss

    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=rows)
    return automesh.Workload(
        step=step,
        args=(state, tokens, tokens),
        init=lambda _: (
            jax.jit(lambda: in_parts()[1])(),
            *jax.device_put(batch_of(next(text.batches(ROWS, LENGTH))), rows),
        ),
        facts={"batch": ROWS, "seq": LENGTH},
        tokens_per_step=ROWS * LENGTH,
    )


if __name__ == "__main__":
    mapped.train(build, batch_of, __file__)
