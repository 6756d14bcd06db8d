"""Writes files that look like those of MNIST: noise with labels, in the format of their source.

python mnist_files.py FOLDER
"""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np

_COUNTS = {"train": 4096, "t10k": 512}


def write(folder: Path) -> None:
    """Writes images of 28 x 28 bytes and their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for name, count in _COUNTS.items():
        images = noise.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = noise.integers(0, 10, count, dtype=np.uint8)
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">II", 2049, count) + labels.tobytes())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
