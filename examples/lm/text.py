"""Batches of the text that is shipped with the examples, one token per byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parent.parent / "data" / "paradise_lost.txt"
VOCABULARY = 256


def batches(rows: int, length: int, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Random crops of the text, without end; the same ones in every run.

    Yields:
      `inputs` and `targets`, int32 [rows, length]: the target of each byte is the byte after it.
    """
    corpus = np.frombuffer(CORPUS.read_bytes(), dtype=np.uint8).astype(np.int32)
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(corpus) - length, size=(rows, 1))
        crops = corpus[starts + np.arange(length + 1)]
        yield {"inputs": crops[:, :-1], "targets": crops[:, 1:]}
