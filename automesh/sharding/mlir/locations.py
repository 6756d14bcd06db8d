"""Where in the user's code an MLIR operation comes from (jax)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automesh.package import is_users_file
from automesh.sharding.passes import Bindings


class SourceReader:
    """Finds the innermost frame in the user's code; remembers what it has seen.

    Args:
      known: what others have read of programs in the same context, to go on with.
    """

    def __init__(self, found: Bindings, known: dict[Any, str] | None = None) -> None:
        self._ir = found.ir
        self._known: dict[Any, str] = {} if known is None else known

    def of(self, operation: Any) -> str:
        """`file.py:12`, or an empty text."""
        return self._innermost(operation.location)

    def _innermost(self, location: Any) -> str:
        # Call stacks share their outer frames: each is looked at once. The hash of a location is
        # that of the Python object; the hash of its attribute is that of what it says.
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
            return self._innermost(location.callee) or self._innermost(location.caller)
        if isinstance(location, ir.FusedLoc):
            return next(filter(None, map(self._innermost, location.locations)), "")
        if isinstance(location, ir.FileLineColLoc):
            return place_of(str(location.filename), location.start_line)
        return ""


# What this process has met: of each file its name, or nothing if it is not the user's; and of each
# name the files. Texts name files by their last part.
_NAMES: dict[str, str] = {}
_FILES: dict[str, dict[str, None]] = {}


def place_of(path: str, line: int) -> str:
    """`file.py:12` of a place in the user's code; empty for other code."""
    name = _NAMES.get(path)
    if name is None:
        name = _NAMES[path] = Path(path).name if is_users_file(path) else ""
        if name:
            _FILES.setdefault(name, {})[path] = None
    return f"{name}:{line}" if name else ""


def files_called(name: str) -> tuple[str, ...]:
    """The user's files of a name that were met in this process."""
    return tuple(_FILES.get(name, ()))
