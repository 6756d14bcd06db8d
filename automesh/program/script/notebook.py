"""Reads the code cells of a notebook's file (no jax)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCell:
    """A code cell of a notebook.

    Attributes:
      text: its code.
      is_meant_to_fail: whether it has Jupyter's tag for this, or was saved with an error as its
        output.
    """

    text: str
    is_meant_to_fail: bool = False


def code_of(content: bytes, name: str) -> list[str]:
    """Returns the texts of the code cells of a notebook, see `cells_of`."""
    return [cell.text for cell in cells_of(content, name)]


def cells_of(content: bytes, name: str) -> list[CodeCell]:
    """Returns the code cells of a notebook, in their order.

    Args:
      name: name of the file, for messages.

    Raises:
      UsageError: the content is no notebook.
    """
    try:
        cells: Any = json.loads(content.decode())["cells"]
        return [
            CodeCell(text="".join(cell["source"]), is_meant_to_fail=_is_meant_to_fail(cell))
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"`{name}` is no notebook that can be read",
            hint="save it as a notebook of version 4, as Jupyter does",
        ) from None


def _is_meant_to_fail(cell: Any) -> bool:
    tags = (cell.get("metadata") or {}).get("tags") or ()
    outputs = cell.get("outputs") or ()
    return "raises-exception" in tags or any(
        isinstance(one, dict) and one.get("output_type") == "error" for one in outputs
    )


def cell_name(path: Path, number: int) -> str:
    """Returns the file name of a code cell, counted from 1, in messages about its lines."""
    return f"{path} [cell {number}]"
