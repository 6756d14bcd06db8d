"""A decoder with routed experts (top-k of E per token), trained on the bytes of Paradise Lost.

Search for a mesh, then train on it:

    cd examples
    automesh search moe_lm.py --target cpu:8 --space moe_lm --rules moe.toml
    python moe_lm.py --devices 8 --rules moe.toml

How the mesh axes are used: `dp`, `fsdp` and `ep` split the rows of the batch; each device along
`ep` also holds its share of the experts, and an all-to-all over `ep` brings the tokens to their
experts and back. `fsdp` splits the parameters at rest, `tp` the heads, the hidden units of every
expert and the vocabulary. `sp` is not used. Where the mesh has the axis `pp`, the layers are dealt
to the ranks along it: `--space moe_lm_pipeline -- --layers 4`.

An expert takes at most `capacity` tokens from one row of the batch, counted from the row's start;
those over it skip the layer's experts. Rows are never cut and never share a capacity, so every
mesh drops the same tokens and computes the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lm import pipelined, presets, training, transformer
from lm.attention import gathered_attention
from lm.layout import Layout, Weight
from lm.presets import Preset
from lm.transformer import Decoder

import automesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer.

    Attributes:
      total: how many there are.
      chosen: how many each token visits.
      room: what an expert takes at most, as a multiple of what it gets if all get alike.
      balance: weight of the loss of uneven routing.
    """

    total: int
    chosen: int
    room: float = 1.25
    balance: float = 0.01

    def capacity(self, length: int) -> int:
        """Tokens that one expert takes from a row of `length` tokens."""
        return math.ceil(length * self.chosen / self.total * self.room)


SIZES = {
    "tiny": Preset(
        model=replace(presets.TINY, d_ff=48),
        rows=48,
        length=48,
        chunk=48,
        optimizer=presets.TINY_OPTIMIZER,
    ),
    "small": Preset(model=presets.SMALL, rows=64, length=1024, chunk=1024),
    "mid": Preset(model=replace(presets.MID, d_ff=2048), rows=64, length=2048, chunk=1024),
    # Mixtral 8x7B (arXiv:2401.04088), table 1.
    "8x7b": Preset(
        model=replace(presets.LLAMA_8B, vocab=32_000), rows=1024, length=4096, chunk=1024
    ),
    # MaxText's configs/models/mixtral-8x22b.yml, qwen3-30b-a3b.yml and qwen3.5-35b-a3b.yml; of the
    # last one, all layers attend here, and no expert is shared.
    "8x22b": Preset(
        model=Decoder(
            vocab=32_768,
            d_model=6144,
            num_layers=56,
            num_heads=48,
            num_kv_heads=8,
            head_size=128,
            d_ff=16_384,
        ),
        rows=1024,
        length=4096,
        chunk=1024,
    ),
    "qwen3-30b-a3b": Preset(
        model=Decoder(
            vocab=151_936,
            d_model=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_size=128,
            d_ff=768,
        ),
        rows=1024,
        length=4096,
        chunk=1024,
    ),
    "qwen3.5-35b-a3b": Preset(
        model=Decoder(
            vocab=248_320,
            d_model=2048,
            num_layers=40,
            num_heads=16,
            num_kv_heads=2,
            head_size=256,
            d_ff=512,
        ),
        rows=8,
        length=1024,
        chunk=1024,
    ),
}
EXPERTS = {
    "tiny": Experts(total=8, chosen=2),
    "small": Experts(total=16, chosen=2),
    "mid": Experts(total=16, chosen=2),
    "8x7b": Experts(total=8, chosen=2),
    "8x22b": Experts(total=8, chosen=2),
    "qwen3-30b-a3b": Experts(total=128, chosen=8),
    "qwen3.5-35b-a3b": Experts(total=256, chosen=8),
}


def build(
    mesh: Mesh,
    remat: str = "full",
    microbatches: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
) -> automesh.Workload:
    """The training step and its arguments on `mesh`; see `dense_lm.build`."""
    options = training.arguments(SIZES)
    size, experts = SIZES[options.size].changed(options), EXPERTS[options.size]
    stages = pipelined.num_stages(mesh, virtual_stages)
    layout = Layout(
        mesh=pipelined.mesh_of_stage(mesh),
        rows=("dp", "fsdp", "ep"),
        sequence=None,
        gathers=options.gather == "step",
    )
    plan = transformer.weights(size.model, expert_weights(size.model, experts))
    loss = partial(
        transformer.loss,
        model=size.model,
        layout=layout,
        plan=plan,
        attention=partial(gathered_attention, layout=layout, chunk=size.chunk),
        mlp=partial(routed, layout=layout, experts=experts),
        remat=remat,
    )
    facts = {**size.facts, "num_experts": experts.total}
    if stages > 1:
        return pipelined.workload(
            loss,
            plan,
            size,
            mesh=mesh,
            layout=layout,
            stages=stages,
            schedule=schedule,
            microbatches=microbatches,
            facts=facts,
        )
    state = training.abstract_state(plan, layout, size.optimizer)
    batch = training.abstract_batch(size.rows, size.length, layout)
    return automesh.Workload(
        step=training.make_step(
            loss, state, layout, microbatches=microbatches, optimizer=size.optimizer
        ),
        args=(state, batch),
        init=lambda _: (training.initial_state(plan, state), training.initial_batch(batch)),
        facts=facts,
        tokens_per_step=size.rows * size.length,
    )


def expert_weights(model: Decoder, experts: Experts) -> dict[str, Weight]:
    """The router and a SwiGLU per expert; `ep` splits the experts."""
    layers, d, f, e = model.num_layers, model.d_model, model.d_ff, experts.total
    inward = Weight(shape=(layers, e, d, f), split=(None, "ep", "fsdp", "tp"), scale=d**-0.5)
    outward = f**-0.5 / (2 * layers) ** 0.5
    return {
        "router": Weight(shape=(layers, d, e), split=(None, None, None), scale=d**-0.5),
        "gate": inward,
        "up": inward,
        "down": Weight(shape=(layers, e, f, d), split=(None, "ep", "tp", "fsdp"), scale=outward),
    }


class Routes(NamedTuple):
    """Where the tokens of some rows go.

    `slot` [b, s, k]: place in the row's buffer of experts x capacity, past its end if dropped;
    `share` [b, s, k]: weight of the expert's answer, float32;
    `balance` [b]: the loss of uneven routing.
    """

    slot: jax.Array
    share: jax.Array
    balance: jax.Array


def routed(
    layer: dict[str, jax.Array], x: jax.Array, *, layout: Layout, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """The feed-forward half of a layer: every token visits the experts that it is routed to."""
    rows, at_experts = P(layout.rows), P(("dp", "fsdp"), "ep")
    capacity = experts.capacity(x.shape[1])

    # Both functions see the rows of one device: [b, s, d].
    def send(x: jax.Array, router: jax.Array) -> tuple[jax.Array, Routes]:
        routes = route(x, router, experts, capacity)
        buffer = jnp.zeros((x.shape[0], experts.total * capacity, x.shape[2]), x.dtype)
        row = jnp.arange(x.shape[0])[:, None, None]
        buffer = buffer.at[row, routes.slot].set(x[:, :, None, :], mode="drop")
        buffer = buffer.reshape(x.shape[0], experts.total, capacity, x.shape[2])
        return jax.lax.all_to_all(buffer, "ep", split_axis=1, concat_axis=0, tiled=True), routes

    def receive(answers: jax.Array, routes: Routes) -> jax.Array:
        answers = jax.lax.all_to_all(answers, "ep", split_axis=0, concat_axis=1, tiled=True)
        answers = answers.reshape(answers.shape[0], experts.total * capacity, answers.shape[3])
        row = jnp.arange(answers.shape[0])[:, None, None]
        answers = answers.at[row, routes.slot].get(mode="fill", fill_value=0)
        return jnp.sum(answers * routes.share[..., None].astype(answers.dtype), axis=2)

    every = Routes(slot=rows, share=rows, balance=rows)
    sent, routes = jax.shard_map(
        send, mesh=layout.mesh, in_specs=(rows, P()), out_specs=(at_experts, every)
    )(x, layer["router"])
    answers = _expert_swiglu(layer, sent, layout)
    mixed = jax.shard_map(receive, mesh=layout.mesh, in_specs=(at_experts, every), out_specs=rows)(
        answers, routes
    )
    return mixed, experts.balance * jnp.mean(routes.balance)


def _expert_swiglu(layer: dict[str, jax.Array], sent: jax.Array, layout: Layout) -> jax.Array:
    """[b, e, c, d] -> the same: each expert on the tokens sent to it."""
    split = (("dp", "fsdp"), "ep", None)
    gate = jnp.einsum("becd,edf->becf", sent, layer["gate"])
    up = jnp.einsum("becd,edf->becf", sent, layer["up"])
    hidden = layout.pin(jax.nn.silu(gate) * up, *split, "tp")
    return layout.pin(jnp.einsum("becf,efd->becd", hidden, layer["down"]), *split, None)


def route(x: jax.Array, router: jax.Array, experts: Experts, capacity: int) -> Routes:
    """Chooses the experts of each token of [b, s, d], row by row, in float32."""
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
    odds = jax.nn.softmax(logits)
    share, expert = jax.lax.top_k(odds, experts.chosen)
    share = share / share.sum(axis=-1, keepdims=True)

    visits = jax.nn.one_hot(expert, experts.total, dtype=jnp.int32)
    in_order = visits.reshape(x.shape[0], -1, experts.total)
    before = (jnp.cumsum(in_order, axis=1) - in_order).reshape(visits.shape)
    place = jnp.sum(before * visits, axis=-1)
    slot = jnp.where(place < capacity, expert * capacity + place, experts.total * capacity)

    # Switch Transformer (arXiv:2101.03961), equation 4: 1 if all experts are visited alike.
    visited = visits.sum(axis=(1, 2)) / (x.shape[1] * experts.chosen)
    balance = experts.total * jnp.sum(visited * odds.mean(axis=1), axis=-1)
    return Routes(slot=slot, share=share, balance=balance)


if __name__ == "__main__":
    training.train(build, __file__, SIZES)
