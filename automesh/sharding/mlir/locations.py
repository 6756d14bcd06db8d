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
        self._names: dict[str, str] = {}

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
            name = self._name(str(location.filename))
            return f"{name}:{location.start_line}" if name else ""
        return ""

    def _name(self, path: str) -> str:
        """Name of a file of the user's; empty for others."""
        known = self._names.get(path)
        if known is None:
            known = self._names[path] = Path(path).name if is_users_file(path) else ""
        return known
