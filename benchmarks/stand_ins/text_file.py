"""Writes random lines of text in ASCII, the same in each run: text_file.py FILE CHARACTERS."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(path: str, characters: str) -> None:
    """Writes the file with the folders above it."""
    drawn = np.random.default_rng(0).integers(32, 127, int(characters), dtype=np.uint8)
    drawn[60::61] = ord("\n")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(drawn.tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
