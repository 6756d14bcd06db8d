"""Writes a file of random 16-bit tokens, for scripts that read their text so.

python token_file.py FILE COUNT VOCABULARY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(path: Path, count: int, vocabulary: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, vocabulary, count, dtype=np.uint16)
    path.write_bytes(tokens.tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
