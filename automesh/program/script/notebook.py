"""What a notebook's file holds: the texts of its code cells (no jax)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automesh.errors import UsageError


def code_of(content: bytes, name: str) -> list[str]:
    """The code cells of a notebook, as they stand in it.

    Args:
      name: of the file, for messages.

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
    """What the text of a code cell, counted from 1, is called where its lines are told."""
    return f"{path} [cell {number}]"
