"""Stands in for `datasets`: any data set is random words, the same in each run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

EXAMPLES = 20_000
WORDS = 64


class Texts:
    """Examples with a `text`, by their numbers or in order; to shuffle them changes nothing."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = list(numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> dict[str, Any]:
        words = np.random.default_rng(self._numbers[place]).integers(0, 1000, WORDS)
        return {"text": " ".join(f"w{word}" for word in words)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def select(self, places: Iterable[int]) -> Texts:
        return Texts(self._numbers[place] for place in places)

    def shuffle(self, *_arguments: Any, **_options: Any) -> Texts:
        return self


def load_dataset(*_names: str, **_options: Any) -> Texts:
    return Texts(range(EXAMPLES))
