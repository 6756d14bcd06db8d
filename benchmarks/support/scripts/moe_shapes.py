"""The example with experts in a shape that every mesh of 16 chips of v5e holds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import moe_lm
from lm.presets import Preset
from lm.transformer import Decoder
from moe_lm import Experts, build

__all__ = ["build"]

_ROUTED = Decoder(
    vocab=32_000,
    d_model=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=16,
    head_size=64,
    d_ff=1024,
)
_EXPERTS = Experts(total=16, chosen=2)
moe_lm.SIZES |= {
    "routed": Preset(model=_ROUTED, rows=64, length=1024, chunk=1024),
    "routed-pod": Preset(model=_ROUTED, rows=256, length=1024, chunk=1024),
}
moe_lm.EXPERTS |= {"routed": _EXPERTS, "routed-pod": _EXPERTS}
