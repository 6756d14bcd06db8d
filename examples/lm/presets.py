"""Sizes of models that more than one example offers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace

from lm.adamw import AdamW
from lm.sgd import SGD
from lm.transformer import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and what it is trained with.

    Attributes:
      model: the decoder.
      rows: rows of the global batch.
      length: tokens of each row.
      chunk: keys that attention looks at together; divides `length`.
      optimizer: hyperparameters.
    """

    model: Decoder
    rows: int
    length: int
    chunk: int
    optimizer: AdamW | SGD = field(default_factory=AdamW)

    @property
    def facts(self) -> dict[str, int]:
        """What the constraints of a search space may refer to."""
        return {
            "batch": self.rows,
            "seq": self.length,
            "vocab": self.model.vocab,
            "d_model": self.model.d_model,
            "d_ff": self.model.d_ff,
            "num_layers": self.model.num_layers,
            "num_heads": self.model.num_heads,
            "num_kv_heads": self.model.num_kv_heads,
        }

    def changed(self, options: argparse.Namespace) -> Preset:
        """With what the command line asks for."""
        length = options.length or self.length
        return replace(
            self,
            rows=options.rows or self.rows,
            length=length,
            chunk=min(options.chunk or self.chunk, length),
            optimizer=SGD() if options.optimizer == "sgd" else self.optimizer,
            model=replace(
                self.model,
                dtype=options.dtype or self.model.dtype,
                num_layers=options.layers or self.model.num_layers,
            ),
        )


# Divisible by most factorizations of 8, 24 and 96 devices; float32, so that losses can be compared.
TINY = Decoder(
    vocab=256,
    d_model=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_size=8,
    d_ff=96,
    dtype="float32",
)
TINY_OPTIMIZER = AdamW(learning_rate=1e-2)

SMALL = Decoder(
    vocab=256,
    d_model=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_size=64,
    d_ff=2048,
)

# Divisible by every factorization of 16 devices.
MID = Decoder(
    vocab=32_000,
    d_model=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=16,
    head_size=64,
    d_ff=8192,
)

# The Llama 3 herd of models (arXiv:2407.21783), table 3; the 1B model from its model card.
LLAMA_1B = Decoder(
    vocab=128_256,
    d_model=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    d_ff=8192,
)
LLAMA_8B = Decoder(
    vocab=128_256,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    d_ff=14_336,
)
LLAMA_70B = Decoder(
    vocab=128_256,
    d_model=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    d_ff=28_672,
)


def _grouped(
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_ff: int,
    *,
    vocab: int,
    head: int = 128,
    tied: bool = False,
) -> Decoder:
    return Decoder(
        tied=tied,
        vocab=vocab,
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        d_ff=d_ff,
    )


# Models whose training configurations are public, by their sizes; queries and keys are not
# normalized here.
PUBLIC = {
    # Llama 2 (arXiv:2307.09288) and MaxText's configs/models/llama2-*.yml.
    "llama2-7b": _grouped(32, 4096, 32, 32, 11_008, vocab=32_000),
    "llama2-13b": _grouped(40, 5120, 40, 40, 13_824, vocab=32_000),
    "llama2-70b": _grouped(80, 8192, 64, 8, 28_672, vocab=32_000),
    # The Llama 3 herd of models (arXiv:2407.21783), table 3.
    "llama3.1-8b": LLAMA_8B,
    "llama3.1-70b": LLAMA_70B,
    "llama3.1-405b": _grouped(126, 16_384, 128, 8, 53_248, vocab=128_256),
    # AXLearn's experiments/text/gpt/fuji.py; hidden units are 8/3 or 3.5 d_model, in steps of 256.
    "fuji-7b-v1": _grouped(32, 4096, 32, 32, 11_008, vocab=32_768, tied=True),
    "fuji-70b-v1": _grouped(80, 8192, 64, 64, 28_672, vocab=32_768),
    "fuji-7b-v2": _grouped(32, 4096, 32, 32, 11_008, vocab=32_768, tied=True),
    "fuji-70b-v2": _grouped(80, 8192, 64, 8, 28_672, vocab=32_768),
    "fuji-7b-v3": _grouped(32, 4096, 32, 8, 11_008, vocab=131_072, tied=True),
    "fuji-70b-v3": _grouped(80, 8192, 64, 8, 28_672, vocab=131_072),
    "fuji-8b-v3-tiktoken": LLAMA_8B,
    "fuji-70b-v3-tiktoken": LLAMA_70B,
    # AXLearn's experiments/text/gpt/gala.py and honeycrisp.py.
    "gala-85m": _grouped(12, 768, 12, 12, 2048, vocab=32_768, head=64, tied=True),
    "gala-1b": _grouped(24, 2048, 32, 32, 5632, vocab=32_768, head=64, tied=True),
    "gala-7b": _grouped(32, 4096, 32, 32, 11_008, vocab=32_768, tied=True),
    "honeycrisp-85m": _grouped(12, 768, 12, 6, 2304, vocab=32_768, head=64, tied=True),
    "honeycrisp-3b": _grouped(26, 3072, 24, 8, 8064, vocab=32_768, tied=True),
    # MaxText's configs/tpu/v4/22b.sh; and configs/base.yml, scaled by get_individual_scales.
    "default-22b": _grouped(48, 6144, 24, 24, 24_576, vocab=32_000),
    "default-32b": _grouped(32, 8192, 64, 64, 28_672, vocab=32_000),
    "default-64b": _grouped(64, 8192, 64, 64, 28_672, vocab=32_000),
    "default-128b": _grouped(64, 8192, 128, 128, 57_344, vocab=32_000),
    "default-512b": _grouped(128, 16_384, 128, 128, 57_344, vocab=32_000),
    "default-1024b": _grouped(128, 16_384, 256, 256, 114_688, vocab=32_000),
    # MaxText's configs/models/qwen3-0.6b.yml.
    "qwen3-0.6b": _grouped(28, 1024, 16, 8, 3072, vocab=151_936, tied=True),
    # ViT-G/14 (arXiv:2106.04560), table 2, as a decoder: a SwiGLU of three matrices with two thirds
    # of the hidden units of the two there, and a vocabulary of the size of its classes.
    "vit-g14": _grouped(48, 1664, 16, 16, 5504, vocab=1024, head=104),
}


def public(rows: int, length: int) -> dict[str, Preset]:
    """The public models, to be trained with this batch unless the command line says otherwise."""
    return {
        name: Preset(model=model, rows=rows, length=length, chunk=min(length, 1024))
        for name, model in PUBLIC.items()
    }
