"""A model of Tunix's that is small enough for tests: Tunix's own code, under the name of a model
that it knows, with other sizes; and a checkpoint of it in the form of the public ones.

Tunix has no argument for sizes of a model.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file  # pyright: ignore[reportMissingImports]
from tunix.models.llama3 import model  # pyright: ignore[reportMissingImports]

NAME = "llama3p2_1b"
WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, VOCABULARY = 64, 128, 4, 4, 16, 2, 512


def use_small_model() -> None:
    """Gives the name to a small model, in this process."""
    small = model.ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD,
        num_kv_heads=KV_HEADS,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    setattr(model.ModelConfig, NAME, lambda: small)


def write_checkpoint(folder: Path) -> None:
    """Weights as Hugging Face's files have them: every matrix as (output, input), in bfloat16."""
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (HEADS * HEAD, WIDTH),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
            f"{prefix}.self_attn.o_proj": (WIDTH, HEADS * HEAD),
            f"{prefix}.mlp.gate_proj": (HIDDEN, WIDTH),
            f"{prefix}.mlp.up_proj": (HIDDEN, WIDTH),
            f"{prefix}.mlp.down_proj": (WIDTH, HIDDEN),
            f"{prefix}.input_layernorm": (WIDTH,),
            f"{prefix}.post_attention_layernorm": (WIDTH,),
        }
    generator = np.random.default_rng(0)
    arrays = {
        f"{name}.weight": jnp.asarray(0.02 * generator.standard_normal(shape), jnp.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, str(folder / "model.safetensors"))
