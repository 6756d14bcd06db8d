"""Stands in for `tensorflow_datasets`: any data set is random images of digits with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

EXAMPLES = 60_000
Split = SimpleNamespace(TRAIN="train", TEST="test", VALIDATION="validation")
ReadConfig = SimpleNamespace
BATCHES = 1000


class Images:
    """Examples of 28 x 28 bytes, the same in each run; what only orders them changes nothing."""

    def __init__(self, size: int = 0, changes: tuple[Callable[[Any], Any], ...] = ()) -> None:
        self._size = size
        self._changes = changes

    def batch(self, size: int, **_options: Any) -> Images:
        return Images(size, self._changes)

    def map(self, change: Callable[[Any], Any], **_options: Any) -> Images:
        return Images(self._size, (*self._changes, change))

    def cache(self) -> Images:
        return self

    def repeat(self, *_arguments: Any) -> Images:
        return self

    def shuffle(self, *_arguments: Any, **_options: Any) -> Images:
        return self

    def prefetch(self, *_arguments: Any, **_options: Any) -> Images:
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        random = np.random.default_rng(0)
        shape = (self._size,) if self._size else ()
        for _ in range(BATCHES):
            image = random.integers(0, 256, (*shape, 28, 28, 1), dtype=np.uint8)
            example: Any = {"image": image, "label": random.integers(0, 10, shape)}
            for change in self._changes:
                example = change(example)
            yield example

    def as_numpy_iterator(self) -> Iterator[dict[str, Any]]:
        return iter(self)


def _binarized(example: dict[str, Any]) -> dict[str, Any]:
    return {**example, "image": example["image"] > 127}


def load(name: str, *, with_info: bool = False, **_options: Any) -> Any:
    """The images, and what is told of each split; of `binarized_mnist` with bits for bytes."""
    splits = dict.fromkeys(("train", "test", "validation"), SimpleNamespace(num_examples=EXAMPLES))
    found = Images(changes=(_binarized,) if name.startswith("binarized") else ())
    return (found, SimpleNamespace(splits=splits)) if with_info else found


def as_numpy(images: Images) -> Iterator[dict[str, Any]]:
    return iter(images)


class Source:
    """The examples of a split by their numbers, each the same in every run."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(int(number))
        image = random.integers(0, 256, (28, 28, 1), dtype=np.uint8)
        return {"image": image, "label": random.integers(0, 10)}


def data_source(_name: str, *, split: str | list[str] = "train", **_options: Any) -> Any:
    """The examples of a split, or of each split of a list."""
    return Source() if isinstance(split, str) else [Source() for _ in split]
