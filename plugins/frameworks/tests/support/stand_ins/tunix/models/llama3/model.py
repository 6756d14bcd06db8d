"""A model of an embedding and one layer, split over two axes by notes of its variables."""

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
from flax import nnx

flax.config.update("flax_always_shard_variable", False)  # As Tunix does.


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices."""

    num_layers: int = 1
    vocab_size: int = 64
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    head_dim: int = 4
    num_kv_heads: int = 2
    remat_config: int = 1


class Llama3(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config, *, rngs):
        self.config = config

        def weight(split, *shape):
            value = jax.random.normal(rngs.params(), shape)
            return nnx.Param(value, out_sharding=split)

        width, hidden = config.embed_dim, config.hidden_dim
        self.table = weight(("tp", "fsdp"), config.vocab_size, width)
        self.heads = weight(("fsdp", "tp", None), width, config.num_kv_heads, config.head_dim)
        self.up = weight(("fsdp", "tp"), width, hidden)
        self.down = weight(("tp", "fsdp"), hidden, width)

    def __call__(self, input_tokens, positions, cache, attention_mask):
        del positions, cache, attention_mask
        block = self.block
        if self.config.remat_config == 3:
            block = functools.partial(nnx.remat(type(self).block), self)
        x = block(self.table[...][input_tokens])
        return x @ self.table[...].T, None

    def block(self, x):
        x = x + jnp.einsum("btd,dnh->bt", x, self.heads[...])[..., None]
        hidden = jax.nn.silu(self._product("up", x))
        return x + self._product("down", hidden)

    def _product(self, name, x):
        out = x @ getattr(self, name)[...]
        if hasattr(self, f"{name}_lora_a"):
            out += x @ getattr(self, f"{name}_lora_a")[...] @ getattr(self, f"{name}_lora_b")[...]
        return out
