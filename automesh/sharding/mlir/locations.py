"""Where in the user's code an MLIR operation comes from (jax)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automesh.package import is_users_file
from automesh.sharding.passes import Bindings


class SourceReader:
    """Finds the innermost frame in the user's code; remembers what it has seen."""

    def __init__(self, found: Bindings) -> None:
        self._ir = found.ir
        self._known: dict[Any, str] = {}

    def of(self, operation: Any) -> str:
        """`file.py:12`, or an empty text."""
        return self._innermost(operation.location)

    def _innermost(self, location: Any) -> str:
        # Call stacks share their outer frames: each is looked at once.
        if location not in self._known:
            self._known[location] = self._found(location)
        return self._known[location]

    def _found(self, location: Any) -> str:
        ir = self._ir
        if isinstance(location, ir.NameLoc):
            return self._innermost(location.child_loc)
        if isinstance(location, ir.CallSiteLoc):
            return self._innermost(location.callee) or self._innermost(location.caller)
        if isinstance(location, ir.FusedLoc):
            return next(filter(None, map(self._innermost, location.locations)), "")
        if isinstance(location, ir.FileLineColLoc):
            path = str(location.filename)
            return f"{Path(path).name}:{location.start_line}" if is_users_file(path) else ""
        return ""
