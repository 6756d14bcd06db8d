"""A decoder language model in Haliax, trained on the bytes of Paradise Lost.

Search for the mesh and the axis mapping together, then train on what was found:

    cd examples
    automesh search haliax_lm.py --target cpu:8 --space haliax_lm.toml
    python haliax_lm.py --devices 8

Nothing in the model or in the step knows automesh: they are Haliax's `NamedArray`s, `named_jit` and
`shard`. `build` takes the mapping of Haliax's axes to mesh axes as an argument, that is all. As
Levanter does, it keeps parameters split by `embed` too, and computes without that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax
from lm import mapped, text

import automesh

ROWS, LENGTH = 16, 32
Batch, Seq, Vocab = hax.Axis("batch", ROWS), hax.Axis("seq", LENGTH), hax.Axis("vocab", 256)
KeySeq = Seq.alias("key_seq")
Embed, Mlp = hax.Axis("embed", 48), hax.Axis("mlp", 192)
Heads, HeadDim, Layers = hax.Axis("heads", 4), hax.Axis("head_dim", 12), hax.Axis("layers", 2)
MAPPING = {"batch": ("dp", "fsdp"), "embed": "fsdp", "mlp": "tp", "heads": "tp", "vocab": "tp"}
PARAMETERS_ONLY = "embed"
OPTIMIZER = optax.adamw(3e-3)


class Attention(eqx.Module):
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Attention:
        k_query, k_key, k_value, k_out = jax.random.split(key, 4)
        make = partial(hnn.Linear.init, In=Embed, Out=(Heads, HeadDim), use_bias=False)
        out = hnn.Linear.init(In=(Heads, HeadDim), Out=Embed, use_bias=False, key=k_out)
        return Attention(make(key=k_query), make(key=k_key), make(key=k_value), out)

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        query = self.query(x)
        key = self.key(x).rename({"seq": "key_seq"})
        value = self.value(x).rename({"seq": "key_seq"})
        mask = hax.arange(Seq).broadcast_axis(KeySeq) >= hax.arange(KeySeq)
        attended = hnn.attention.dot_product_attention(
            KeySeq, HeadDim, query, key, value, mask=mask
        )
        return self.out(hax.auto_sharded(attended))


class Block(eqx.Module):
    attention: Attention
    up: hnn.Linear
    down: hnn.Linear
    norm_1: hnn.LayerNorm
    norm_2: hnn.LayerNorm

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        k_attention, k_up, k_down = jax.random.split(key, 3)
        return Block(
            Attention.init(key=k_attention),
            hnn.Linear.init(In=Embed, Out=Mlp, key=k_up),
            hnn.Linear.init(In=Mlp, Out=Embed, key=k_down),
            hnn.LayerNorm.init(Embed),
            hnn.LayerNorm.init(Embed),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        x = hax.auto_sharded(x + self.attention(self.norm_1(x)))
        hidden = hax.auto_sharded(hnn.gelu(self.up(self.norm_2(x))))
        return hax.auto_sharded(x + self.down(hidden))


class Decoder(eqx.Module):
    tokens: hnn.Embedding
    places: hnn.Embedding
    blocks: hnn.Stacked[Block]
    norm: hnn.LayerNorm
    head: hnn.Linear

    @staticmethod
    def init(key: jax.Array) -> Decoder:
        k_tokens, k_places, k_blocks, k_head = jax.random.split(key, 4)
        return Decoder(
            hnn.Embedding.init(Vocab, Embed, key=k_tokens),
            hnn.Embedding.init(Seq, Embed, key=k_places),
            hnn.Stacked.init(Layers, Block)(key=jax.random.split(k_blocks, Layers.size)),
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(In=Embed, Out=Vocab, use_bias=False, key=k_head),
        )

    def __call__(self, inputs: hax.NamedArray) -> hax.NamedArray:
        x = hax.auto_sharded(self.tokens(inputs) + self.places(hax.arange(Seq)))
        return self.head(self.norm(self.blocks.fold(x)))


def loss_of(model: Decoder, inputs: hax.NamedArray, targets: hax.NamedArray) -> jax.Array:
    labels = hnn.one_hot(targets, Vocab)
    return hnn.cross_entropy_loss(model(inputs), Vocab, labels).scalar()


def train_step(state: Any, inputs: hax.NamedArray, targets: hax.NamedArray) -> tuple[Any, Any]:
    model, optimizer_state = state
    # The parameters are gathered for the computation, and their gradients scattered after it.
    loss, gradients = eqx.filter_value_and_grad(loss_of)(hax.auto_sharded(model), inputs, targets)
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, model)
    return (eqx.apply_updates(model, updates), optimizer_state), loss


def initial_state(key: jax.Array) -> tuple[Decoder, Any]:
    model = Decoder.init(key)
    return model, OPTIMIZER.init(model)


def batch_of(rows: mapped.Rows) -> tuple[hax.NamedArray, ...]:
    return tuple(hax.named(rows[name], (Batch, Seq)) for name in ("inputs", "targets"))


def first_batch() -> tuple[hax.NamedArray, ...]:
    return batch_of(next(text.batches(ROWS, LENGTH)))


def build(mesh: jax.sharding.Mesh, mapping: dict[str, Any] = MAPPING) -> automesh.Workload:
    """The training step and its arguments on `mesh`: what `automesh search` compiles and measures.

    Args:
      mesh: has the axes of the search space.
      mapping: Haliax axis -> mesh axes; None where it is not split.
    """
    jax.set_mesh(mesh)  # In force while the step is traced and run.
    parameters = {axis: split for axis, split in mapping.items() if split}
    compute = {axis: split for axis, split in parameters.items() if axis != PARAMETERS_ONLY}
    step = hax.fsdp(train_step, parameters, compute)

    def placed(tree: Any) -> Any:
        shardings = hax.partitioning.infer_resource_partitions(
            tree, parameters, preserve_existing_shardings=False
        )
        return jax.tree.map(
            lambda named, sharding: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), named
            ),
            tree,
            shardings,
            is_leaf=lambda node: isinstance(node, hax.NamedArray),
        )

    state = placed(eqx.filter_eval_shape(initial_state, jax.random.key(0)))
    return automesh.Workload(
        step=step,
        args=(state, *placed(jax.eval_shape(first_batch))),
        donate_argnums=0,
        init=lambda _: (
            hax.named_jit(initial_state, out_axis_resources=parameters)(jax.random.key(0)),
            *hax.shard(first_batch(), parameters),
        ),
        facts={"batch": ROWS, "seq": LENGTH},
        tokens_per_step=ROWS * LENGTH,
    )


if __name__ == "__main__":
    mapped.train(build, batch_of, __file__)
