"""A decoder of the Llama family: RMSNorm, RoPE, grouped queries, scanned layers.

What differs between the examples is handed in: how queries meet keys (`attention`) and what follows
(`mlp`).

Letters of shapes: b rows, s positions, d model, k key heads, g queries per key head, h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from automesh import pipeline
from lm.attention import rotated
from lm.layout import Dimension, Layout, Weight

# (queries [b, s, k, g, h], keys and values [2, b, s, k, h]) -> [b, s, k, g, h]
Attention = Callable[[jax.Array, jax.Array], jax.Array]
# (weights of the layer, activations [b, s, d]) -> (the same shape, an addition to the loss)
MLP = Callable[[dict[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a decoder; `dtype` is what it computes in, its weights are always float32.

    `tied`: head and embedding are one matrix.
    """

    vocab: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    d_ff: int
    dtype: str = "bfloat16"
    tied: bool = False


def weights(model: Decoder, mlp: dict[str, Weight]) -> dict[str, Any]:
    """All trained arrays; `mlp` are those of the layers' second half.

    `fsdp` splits every matrix at rest, `tp` its heads, its hidden units or its vocabulary.
    """
    layers, d, k, h = model.num_layers, model.d_model, model.num_kv_heads, model.head_size
    g = model.num_heads // k
    inward = d**-0.5
    outward = (model.num_heads * h) ** -0.5 / (2 * layers) ** 0.5
    norm = Weight(shape=(layers, d), split=(None, None), scale=0)
    heads = (None, "fsdp", "tp", None)
    head = Weight(shape=(d, model.vocab), split=("fsdp", "tp"), scale=inward)
    return {
        "embedding": Weight(
            shape=(model.vocab, d), split=("tp", "fsdp"), scale=inward if model.tied else 1.0
        ),
        "layers": {
            "attention_norm": norm,
            "query": Weight(shape=(layers, d, k, g, h), split=(*heads, None), scale=inward),
            "key": Weight(shape=(layers, d, k, h), split=heads, scale=inward),
            "value": Weight(shape=(layers, d, k, h), split=heads, scale=inward),
            "output": Weight(
                shape=(layers, k, g, h, d), split=(None, "tp", None, None, "fsdp"), scale=outward
            ),
            "mlp_norm": norm,
            **mlp,
        },
        "final_norm": Weight(shape=(d,), split=(None,), scale=0),
        **({} if model.tied else {"head": head}),
    }


def swiglu_weights(model: Decoder) -> dict[str, Weight]:
    """The three matrices of a dense SwiGLU."""
    layers, d, f = model.num_layers, model.d_model, model.d_ff
    inward = Weight(shape=(layers, d, f), split=(None, "fsdp", "tp"), scale=d**-0.5)
    outward = f**-0.5 / (2 * layers) ** 0.5
    return {
        "gate": inward,
        "up": inward,
        "down": Weight(shape=(layers, f, d), split=(None, "tp", "fsdp"), scale=outward),
    }


def swiglu(
    layer: dict[str, jax.Array], x: jax.Array, *, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """The feed-forward half of a layer (arXiv:2002.05202), its hidden units split over tp."""
    hidden = jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])
    hidden = layout.pin(hidden, layout.rows, layout.sequence, "tp")
    return hidden @ layer["down"], jnp.zeros((), jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (normed * scale).astype(x.dtype)


def loss(
    params: dict[str, Any],
    batch: dict[str, jax.Array],
    *,
    model: Decoder,
    layout: Layout,
    plan: dict[str, Any],
    attention: Attention,
    mlp: MLP,
    remat: str,
    adds: bool = True,
) -> jax.Array:
    """Mean cross entropy of the next token, in nats, plus what `mlp` adds.

    Args:
      params: arrays in the structure of `plan`, float32; for a pipeline `layers` is a tuple of as
        many trees as there are stages.
      batch: `inputs` and `targets`, int32 [b, s].
      plan: the `Weight`s.
      remat: what the backward pass computes again: `none`, `full`, or all but matrix products
        (`dots`).
      adds: False where `mlp` adds 0: stages need not send it to the last one.
    """
    dtype = jnp.dtype(model.dtype)
    ready = partial(_ready, layout=layout, dtype=dtype)
    embedding = ready(params["embedding"], plan["embedding"].split)
    x = embedding[batch["inputs"]]
    x = layout.pin(x, layout.rows, layout.sequence, None)

    def layer(x: jax.Array, stored: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer = {name: ready(w, plan["layers"][name].split[1:]) for name, w in stored.items()}
        return _layer(x, layer, layout=layout, attention=attention, mlp=mlp)

    extra: list[jax.Array] = []
    for number, stage in enumerate(_stages(params["layers"])):
        x = pipeline.stage_boundary(x) if number else x
        x, more = jax.lax.scan(rematerialized(layer, remat), x, stage)
        extra.append(more)
    x = rms_norm(x, params["final_norm"])
    head = embedding.T if model.tied else ready(params["head"], plan["head"].split)
    logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
    logits = layout.pin(logits, layout.rows, layout.sequence, "tp")
    entropy = jnp.mean(_cross_entropy(logits, batch["targets"]))
    return entropy + jnp.mean(jnp.concatenate(extra)) if adds else entropy


def _stages(layers: Any) -> tuple[Any, ...]:
    return layers if isinstance(layers, tuple) else (layers,)


def _ready(
    weight: jax.Array, split: tuple[Dimension, ...], *, layout: Layout, dtype: jnp.dtype
) -> jax.Array:
    """A weight as the layer needs it: in the computing dtype, and gathered over fsdp (ZeRO-3)."""
    if weight.ndim == 1:
        return weight
    return layout.gathered(weight.astype(dtype), split)


def _layer(
    x: jax.Array, layer: dict[str, jax.Array], *, layout: Layout, attention: Attention, mlp: MLP
) -> tuple[jax.Array, jax.Array]:
    positions = jnp.arange(x.shape[1])
    normed = rms_norm(x, layer["attention_norm"])
    queries = rotated(jnp.einsum("bsd,dkgh->bskgh", normed, layer["query"]), positions)
    keys = rotated(jnp.einsum("bsd,dkh->bskh", normed, layer["key"]), positions)
    values = jnp.einsum("bsd,dkh->bskh", normed, layer["value"])
    queries = layout.pin(queries, layout.rows, layout.sequence, "tp", None, None)
    mixed = attention(queries, jnp.stack([keys, values]))
    x = x + jnp.einsum("bskgh,kghd->bsd", mixed, layer["output"])
    # Between the halves of a layer the rows are split along their length too, so that norms and
    # residuals are neither computed nor kept more than once.
    x = layout.pin(x, layout.rows, layout.sequence, None)
    added, extra = mlp(layer, rms_norm(x, layer["mlp_norm"]))
    return layout.pin(x + added, layout.rows, layout.sequence, None), extra


def rematerialized(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The layer, keeping for the backward pass what `remat` says."""
    policies = {
        "none": jax.checkpoint_policies.everything_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    if remat not in policies:
        raise ValueError(f"remat is one of {', '.join(policies)}, not {remat!r}")
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=policies[remat], prevent_cse=False)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    # A comparison, not an index: the vocabulary is split over tp, and an index would gather it.
    wanted = targets[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(wanted, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
