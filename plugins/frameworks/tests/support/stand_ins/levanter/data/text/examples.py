"""One row of a batch: tokens, what each counts, and which document each is of."""

from dataclasses import dataclass

import equinox
import haliax
import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrugLmExample:
    tokens: jax.Array
    loss_weight: jax.Array
    segment_ids: jax.Array | None

    @staticmethod
    def causal(tokens, *, eos_id=None, block_cross_document_attention=True):
        weight = (jnp.arange(tokens.shape[0]) < tokens.shape[0] - 1).astype(jnp.float32)
        has_documents = block_cross_document_attention and eos_id is not None
        return GrugLmExample(
            tokens, weight, jnp.cumsum(tokens == eos_id) if has_documents else None
        )


class LmExample(equinox.Module):
    tokens: haliax.NamedArray
    loss_weight: haliax.NamedArray
    segment_ids: haliax.NamedArray | None


def named_lm_example_from_grug(example, Pos):
    segments = example.segment_ids
    return LmExample(
        haliax.named(example.tokens, Pos),
        haliax.named(example.loss_weight, Pos),
        None if segments is None else haliax.named(segments, Pos),
    )
