"""Reads the code cells of a notebook's file (no jax)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automesh.errors import UsageError


def code_of(content: bytes, name: str) -> list[str]:
    """The code cells of a notebook, in order.

    Args:
      name: name of the file, for messages.

    Raises:
      UsageError: it is no notebook.
    """
    try:
        cells: Any = json.loads(content.decode())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"`{name}` is no notebook that can be read",
            hint="save it as a notebook of version 4, as Jupyter does",
        ) from None


def cell_name(path: Path, number: int) -> str:
    """The file name of a code cell, counted from 1, in messages about its lines."""
    return f"{path} [cell {number}]"
