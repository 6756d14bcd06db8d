"""A small decoder whose arrays have logical axes."""

import jax.numpy as jnp
from flax import linen as nn

_init = nn.initializers.normal(0.02)


class Block(nn.Module):
    """A mixer over the positions, and a layer over the features."""

    embed: int
    mlp: int

    @nn.compact
    def __call__(self, x, deterministic):
        up = self.param(
            "up", nn.with_logical_partitioning(_init, ("embed", "mlp")), (self.embed, self.mlp)
        )
        down = self.param(
            "down", nn.with_logical_partitioning(_init, ("mlp", "embed")), (self.mlp, self.embed)
        )
        mixed = jnp.cumsum(x, axis=1) / x.shape[1]
        y = nn.gelu((x + mixed) @ up) @ down
        y = nn.Dropout(0.1)(y, deterministic=deterministic)
        return nn.with_logical_constraint(x + y, ("activation_batch", None, None))


class TransformerLM(nn.Module):
    """Tokens in, logits out."""

    vocab: int
    embed: int
    mlp: int
    layers: int

    @nn.compact
    def __call__(self, tokens, deterministic=False):
        table = self.param(
            "embedding",
            nn.with_logical_partitioning(_init, ("vocab", "embed")),
            (self.vocab, self.embed),
        )
        x = table[tokens]
        x = nn.with_logical_constraint(x, ("activation_batch", None, None))
        for _ in range(self.layers):
            x = Block(embed=self.embed, mlp=self.mlp)(x, deterministic)
        return x @ table.T
