"""A model of one layer, whose vocabulary is looked up by a product."""

import dataclasses
from dataclasses import dataclass

import equinox
import haliax
import jax
import jax.numpy as jnp
from haliax import Axis

from levanter.kernels.pallas.fused_cross_entropy_loss.api import loss_of


@dataclass(frozen=True)
class LlamaConfig:
    max_seq_len: int = 16
    hidden_dim: int = 32
    intermediate_dim: int = 64
    num_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 4
    gradient_checkpointing: object = True

    max_Pos = property(lambda self: Axis("position", self.max_seq_len))

    def __post_init__(self):
        haliax.ScanCheckpointPolicy._mk(self.gradient_checkpointing)

    @staticmethod
    def get_choice_name(kind):
        return "llama"

    def build(self, Vocab, *, key):
        Embed, Mlp = Axis("embed", self.hidden_dim), Axis("mlp", self.intermediate_dim)
        names = {"table": (Vocab, Embed), "up": (Embed, Mlp), "down": (Mlp, Embed)}
        keys = jax.random.split(key, 3)
        made = {
            name: haliax.random.normal(one, axes)
            for one, (name, axes) in zip(keys, names.items(), strict=True)
        }
        return LlamaModel(**made, config=self)


class LlamaModel(equinox.Module):
    table: haliax.NamedArray
    up: haliax.NamedArray
    down: haliax.NamedArray
    config: LlamaConfig = equinox.field(static=True)
    activation: object = jnp.tanh  # As in Levanter's models, a leaf that is no array.

    def compute_next_token_loss(self, example, *, key=None, logsumexp_weight=None):
        Mlp = self.up.resolve_axis("mlp")

        def layer(model, rows):
            hidden = haliax.named(rows.array @ model.up.array, (*rows.axes[:-1], Mlp))
            hidden = haliax.tanh(haliax.auto_sharded(hidden))
            return haliax.named(hidden.array @ model.down.array, rows.axes)

        policy = haliax.ScanCheckpointPolicy._mk(self.config.gradient_checkpointing)
        rows = self.table.take("vocab", example.tokens)
        rows = policy.checkpoint("carry", "input", layer)(self, rows)
        loss = loss_of(rows.array, example.loss_weight.array)
        if example.segment_ids is not None:
            loss = loss * (example.segment_ids.array + 1)
        return haliax.named(loss, example.tokens.axes) + logsumexp_weight


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3

    def build(self, num_train_steps):
        return dataclasses.replace(self, learning_rate=self.learning_rate / num_train_steps)
