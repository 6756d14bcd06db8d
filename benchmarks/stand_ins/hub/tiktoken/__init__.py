"""Stands in for `tiktoken`: a word's token is its hash."""

from __future__ import annotations

import zlib
from typing import Any


class Encoding:
    """Makes of each word one of 256 tokens."""

    n_vocab = 256
    eot_token = 0

    def encode(self, text: str, **_options: Any) -> list[int]:
        return [zlib.crc32(word.encode()) % self.n_vocab for word in text.split()]

    encode_ordinary = encode

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens)


def get_encoding(_name: str) -> Encoding:
    return Encoding()
