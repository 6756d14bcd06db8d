"""A decoder on long sequences with ring attention, trained on the bytes of Paradise Lost.

Search for a mesh, then train on it:

    cd examples
    automesh search long_context.py --target cpu:8 --space long_context --rules long.toml
    python long_context.py --devices 8 --rules long.toml

How the mesh axes are used: `sp` splits each row along its length. No device ever holds the keys of
a whole row: they travel round the ring of devices along `sp`, forward and backward, while each
device attends to those that it has (arXiv:2310.01889). `dp` and `fsdp` split the rows of the
batch, `fsdp` also the parameters at rest, `tp` the heads, the hidden units and the vocabulary.
`ep` is not used.

Keys that a query may not see are computed and thrown away: with rows cut into neighbouring pieces
the last device sees all of them, and if the others skipped theirs the step would not be faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lm import presets, training, transformer
from lm.attention import Partial, attend, attend_backward, finished, nothing_seen
from lm.layout import Layout
from lm.presets import Preset

import automesh

SIZES = {
    "tiny": Preset(
        model=presets.TINY, rows=24, length=96, chunk=96, optimizer=presets.TINY_OPTIMIZER
    ),
    "small": Preset(model=presets.SMALL, rows=8, length=16_384, chunk=1024),
    "mid": Preset(model=presets.MID, rows=16, length=32_768, chunk=1024),
    # The length of the last stage of Llama 3's training.
    "8b-128k": Preset(model=presets.LLAMA_8B, rows=32, length=131_072, chunk=1024),
    "70b-128k": Preset(model=presets.LLAMA_70B, rows=32, length=131_072, chunk=1024),
    **presets.public(rows=32, length=131_072),
}


def build(mesh: Mesh, remat: str = "full", microbatches: int = 1) -> automesh.Workload:
    """The training step and its arguments on `mesh`; see `dense_lm.build`."""
    options = training.arguments(SIZES)
    size = SIZES[options.size].changed(options)
    layout = Layout(mesh=mesh, gathers=options.gather == "step")
    plan = transformer.weights(size.model, transformer.swiglu_weights(size.model))
    state = training.abstract_state(plan, layout, size.optimizer)
    batch = training.abstract_batch(size.rows, size.length, layout)
    loss = partial(
        transformer.loss,
        model=size.model,
        layout=layout,
        plan=plan,
        attention=partial(ring_attention, layout=layout, chunk=size.chunk),
        mlp=partial(transformer.swiglu, layout=layout),
        remat=remat,
    )
    return automesh.Workload(
        step=training.make_step(
            loss, state, layout, microbatches=microbatches, optimizer=size.optimizer
        ),
        args=(state, batch),
        init=lambda _: (training.initial_state(plan, state), training.initial_batch(batch)),
        facts=size.facts,
        tokens_per_step=size.rows * size.length,
    )


def ring_attention(
    queries: jax.Array, keys_values: jax.Array, *, layout: Layout, chunk: int
) -> jax.Array:
    """Each device's queries against the keys of their rows, piece by piece as they come round.

    Args:
      queries: [b, s, k, g, h], split over sp along s.
      keys_values: [2, b, s, k, h], split in the same way.
      layout: of the activations.
      chunk: keys looked at together at most.
    """
    split = P(layout.rows, "sp", "tp")
    chunk = min(chunk, queries.shape[1] // layout.mesh.shape["sp"])
    ring = jax.shard_map(
        partial(_ring, Ring(devices=layout.mesh.shape["sp"], chunk=chunk)),
        mesh=layout.mesh,
        in_specs=(split, P(None, *split)),
        out_specs=split,
    )
    return ring(queries, keys_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The devices along sp, seen from one of them (inside shard_map).

    A piece is the keys and values of one device. It moves on by one device per step, so that in
    step n a device holds the piece of the n-th device before it.
    """

    devices: int
    chunk: int

    def first_query(self, piece: jax.Array) -> jax.Array:
        return jax.lax.axis_index("sp") * piece.shape[2]

    def first_key(self, piece: jax.Array, number: jax.Array | int) -> jax.Array:
        return (jax.lax.axis_index("sp") - number) % self.devices * piece.shape[2]

    def onward(self, tree: Any) -> Any:
        if self.devices == 1:
            return tree
        to = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, "sp", to), tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, queries: jax.Array, keys_values: jax.Array) -> jax.Array:
    return _ring_forward(ring, queries, keys_values)[0]


def _ring_forward(
    ring: Ring, queries: jax.Array, keys_values: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def look(seen: Partial, piece: jax.Array, number: jax.Array | int) -> Partial:
        return attend(
            seen,
            queries,
            piece,
            first_query=ring.first_query(piece),
            first_key=ring.first_key(piece, number),
            chunk=ring.chunk,
        )

    # The next piece travels while the present one is looked at. The first is the device's own, so
    # that each query sees a key at once.
    def next_piece(held: tuple[Partial, jax.Array], number: jax.Array) -> tuple[Any, None]:
        seen, piece = held
        return (look(seen, piece, number), ring.onward(piece)), None

    held = (_varying(nothing_seen(queries)), keys_values)
    (seen, last), _ = jax.lax.scan(next_piece, held, jnp.arange(ring.devices - 1))
    seen = look(seen, last, ring.devices - 1)
    output = finished(seen, queries.dtype)
    return output, (queries, keys_values, output, seen.top + jnp.log(seen.weights))


def _ring_backward(
    ring: Ring, kept: tuple[jax.Array, ...], d_output: jax.Array
) -> tuple[jax.Array, jax.Array]:
    queries, keys_values, output, log_weights = kept
    slope = jnp.sum((output * d_output).astype(jnp.float32), axis=-1)

    # The gradients of a piece travel with it; after a whole round both are at home again.
    def next_piece(held: tuple[jax.Array, ...], number: jax.Array) -> tuple[Any, None]:
        d_queries, piece, d_piece = held
        more_queries, more_piece = attend_backward(
            queries,
            piece,
            d_output,
            slope,
            log_weights,
            first_query=ring.first_query(piece),
            first_key=ring.first_key(piece, number),
            chunk=ring.chunk,
        )
        piece, d_piece = ring.onward((piece, d_piece + more_piece))
        return (d_queries + more_queries, piece, d_piece), None

    zeros = _varying((jnp.zeros(queries.shape), jnp.zeros(keys_values.shape)))
    held = (zeros[0], keys_values, zeros[1])
    (d_queries, _, d_piece), _ = jax.lax.scan(next_piece, held, jnp.arange(ring.devices))
    return d_queries.astype(queries.dtype), d_piece.astype(keys_values.dtype)


_ring.defvjp(_ring_forward, _ring_backward)


def _varying(tree: Any) -> Any:
    """Constants as shard_map wants the carry of a loop: as if they differed between devices."""
    axes = ("dp", "fsdp", "tp", "sp")
    return jax.tree.map(lambda array: jax.lax.pcast(array, axes, to="varying"), tree)


if __name__ == "__main__":
    training.train(build, __file__, SIZES)
