"""What the published closed forms promise of each schedule, written down beside automesh's own."""

from __future__ import annotations

SPLIT = ("zb_h1", "zb_h2", "dualpipe_v")


def promised_held(name: str, p: int, m: int, v: int = 1) -> list[int]:
    """Of each of p ranks with v stages the most activations that it holds."""
    r = m // max(1, m // p)
    held = {
        "gpipe": lambda s: m,
        "1f1b": lambda s: p - s,
        "eager_1f1b": lambda s: 2 * (p - s) - 1,
        "interleaved": lambda s: (v - 1) * r + 2 * (p - 1 - s) + 1,
        "kimi_k2": lambda s: (v - 1) * r + 2 * (p - 1 - s) + 2,
        "wavefront": lambda s: (v - 1) * p + 2 * (p - 1 - s) + 1,
        "zb_h1": lambda s: p,
        "zb_h2": lambda s: 2 * p - 1,
        "dualpipe_v": lambda s: 2 * p + 1,
    }[name]
    return [min(held(rank), m * v) for rank in range(p)]


def promised_makespan(name: str, p: int, m: int, v: int = 1) -> float:
    """Of a step whose forward takes 1 on a rank, its backward 2 and each half of that 1."""
    return 3 * m + (p - 1) * (1 if name in SPLIT else 3) / v
