"""Finds the line of the user's code that an MLIR operation comes from (jax)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automesh.package import is_users_file
from automesh.sharding.mlir.wrappers import is_in_a_wrapper
from automesh.sharding.passes import Bindings


class SourceReader:
    """Finds the innermost frame in the user's code, with a cache.

    For the constraint of a function that does nothing else, it is the line that calls the function.

    Args:
      known: a cache that other readers of the same context have filled.
    """

    def __init__(self, found: Bindings, known: dict[Any, str] | None = None) -> None:
        self._ir = found.ir
        self._known: dict[Any, str] = {} if known is None else known

    def of(self, operation: Any) -> str:
        """Returns `file.py:12`, or an empty text."""
        return self._innermost(operation.location)

    def _innermost(self, location: Any) -> str:
        # Call stacks share their outer frames, so that each is read once. A location is hashed by
        # its Python object, but its attribute is hashed by its content.
        key = location.attr
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._found(location)
        return known

    def _found(self, location: Any) -> str:
        ir = self._ir
        if isinstance(location, ir.NameLoc):
            return self._innermost(location.child_loc)
        if isinstance(location, ir.CallSiteLoc):
            inner = self._innermost(location.callee)
            if not inner or self._is_wrapper(location.callee):
                return self._innermost(location.caller) or inner
            return inner
        if isinstance(location, ir.FusedLoc):
            return next(filter(None, map(self._innermost, location.locations)), "")
        if isinstance(location, ir.FileLineColLoc):
            return place_of(str(location.filename), location.start_line)
        return ""

    def _is_wrapper(self, location: Any) -> bool:
        """Whether the frame is the constraint of a function that does nothing else."""
        ir = self._ir
        while isinstance(location, ir.NameLoc):
            location = location.child_loc
        return isinstance(location, ir.FileLineColLoc) and is_in_a_wrapper(
            str(location.filename), location.start_line
        )


# Caches of this process: the name of each file, or nothing if it is not the user's; and the files
# of each name. Texts only have the last part of a path.
_NAMES: dict[str, str] = {}
_FILES: dict[str, dict[str, None]] = {}


def place_of(path: str, line: int) -> str:
    """Returns `file.py:12` for a place in the user's code; empty for other code."""
    name = _NAMES.get(path)
    if name is None:
        name = _NAMES[path] = Path(path).name if is_users_file(path) else ""
        if name:
            _FILES.setdefault(name, {})[path] = None
    return f"{name}:{line}" if name else ""


def files_called(name: str) -> tuple[str, ...]:
    """Lists the user's files with a name that this process has seen."""
    return tuple(_FILES.get(name, ()))
