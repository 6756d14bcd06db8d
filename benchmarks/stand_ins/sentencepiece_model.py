"""Trains a SentencePiece model on made-up words: sentencepiece_model.py FILE PIECES.

The ids of padding, end, beginning and unknown are 0 to 3. It needs the package `sentencepiece`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LINES = 2000
WORDS = 20


def main(path: str, pieces: str) -> None:
    """Writes the model with the folders above it."""
    trainer: Any = import_module("sentencepiece").SentencePieceTrainer
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    letters = np.random.default_rng(0).integers(97, 123, (LINES, WORDS, 4), dtype=np.uint8)
    lines = [" ".join(word.tobytes().decode() for word in line) for line in letters]
    with target.open("wb") as model:
        trainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=int(pieces),
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            minloglevel=2,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
