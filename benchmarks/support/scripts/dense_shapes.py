"""The dense example in shapes of which every mesh of 16 chips of v5e holds the training state.

The example's own sizes are models that people know; most of them leave no room for `dp:16`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import dense_lm
from dense_lm import build
from lm.presets import Preset
from lm.transformer import Decoder

__all__ = ["build"]

# Divisible by every factorization of 16 devices.
_BASE = Decoder(
    vocab=32_000,
    d_model=2048,
    num_layers=4,
    num_heads=16,
    num_kv_heads=16,
    head_size=128,
    d_ff=8192,
)
# Few large weights, short of rows.
_WIDE = Decoder(
    vocab=16_000,
    d_model=4096,
    num_layers=2,
    num_heads=32,
    num_kv_heads=16,
    head_size=128,
    d_ff=16_384,
)
# Many small layers and a large vocabulary: latency matters.
_NARROW = Decoder(
    vocab=50_304,
    d_model=1024,
    num_layers=12,
    num_heads=16,
    num_kv_heads=16,
    head_size=64,
    d_ff=4096,
)
# `pod`: the same model with the batch of 64 chips.
dense_lm.SIZES |= {
    "base": Preset(model=_BASE, rows=64, length=1024, chunk=1024),
    "base-pod": Preset(model=_BASE, rows=512, length=1024, chunk=1024),
    "wide": Preset(model=_WIDE, rows=16, length=2048, chunk=1024),
    "wide-pod": Preset(model=_WIDE, rows=128, length=2048, chunk=1024),
    "narrow": Preset(model=_NARROW, rows=32, length=512, chunk=512),
    "narrow-pod": Preset(model=_NARROW, rows=256, length=512, chunk=512),
}
