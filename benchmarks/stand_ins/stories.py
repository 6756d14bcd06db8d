"""Writes made-up stories in one file, each with an end mark: stories.py FILE COUNT."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

WORDS = 40


def main(path: str, count: str) -> None:
    """Writes the file with the folders above it; it is the same in each run."""
    random = np.random.default_rng(0)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for _ in range(int(count)):
            letters = random.integers(97, 123, (WORDS, 4), dtype=np.uint8)
            file.write(b" ".join(word.tobytes() for word in letters) + b"<|endoftext|>\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
