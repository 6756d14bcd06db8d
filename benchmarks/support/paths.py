"""Where things are: the repository, and what the benchmarks read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# What others published.
DATA = ROOT / "benchmarks" / "data"
