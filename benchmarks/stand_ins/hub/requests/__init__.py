"""Stands in for `requests`: every address holds the same random words."""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = 200_000


class Response:
    """What is found at any address."""

    status_code = 200

    @property
    def text(self) -> str:
        words = np.random.default_rng(0).integers(0, 1000, WORDS)
        return " ".join(f"w{word}" for word in words)

    def raise_for_status(self) -> None:
        pass


def get(_address: str, **_options: Any) -> Response:
    return Response()
