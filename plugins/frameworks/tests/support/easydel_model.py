"""A small language model, its tokenizer and a few texts for EasyDeL's own training command.

python -m plugins.frameworks.tests.support.easydel_model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import easydel  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
from tokenizers.models import WordLevel  # pyright: ignore[reportMissingImports]
from tokenizers.pre_tokenizers import Whitespace  # pyright: ignore[reportMissingImports]
from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

_WORDS = 500
_TEXTS = 256


def main(folder: Path) -> None:
    config = easydel.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        sharding_axis_dims=(1, -1, 1, 1, 1),
    )
    config.architectures = ["LlamaForCausalLM"]
    model = easydel.AutoEasyDeLModelForCausalLM.from_config(
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    model.save_pretrained(folder / "model")
    names = ["<pad>", "<eos>", "<unk>", *(f"word{index}" for index in range(_WORDS))]
    words = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    texts = [
        " ".join(f"word{(at * 7 + one) % _WORDS}" for one in range(40)) for at in range(_TEXTS)
    ]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
