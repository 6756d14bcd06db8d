"""Sizes of models that more than one example offers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lm.adamw import AdamW
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
    optimizer: AdamW = field(default_factory=AdamW)

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
