"""Writes a tokenizer of made-up words, and a text in its 32-bit tokens.

python word_tokenizer.py FOLDER WORDS TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def main(folder: str, words: str, tokens: str) -> None:
    """Writes `tokenizer.json`, as the package `tokenizers` reads it, and `tokenized_text.bin`; both
    are the same in each run."""
    place, count = Path(folder), int(words)
    place.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"w{number}": number for number in range(count)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    drawn = np.random.default_rng(0).integers(0, count, int(tokens), dtype=np.int32)
    (place / "tokenized_text.bin").write_bytes(drawn.tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
