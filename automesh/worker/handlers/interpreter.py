"""Protects state of the interpreter that user code may change and the worker's loop needs:
builtins, the recursion limit, trace functions.

While the worker reads an order or makes and sends an outcome, this state is Python's own. When user
code runs again, its changes are back: a script that replaces `print` wants to.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

# Bound now: user code may later replace these names, and `vars` and `dict`.
_NAMES = builtins.__dict__
_copy, _update, _get = dict.copy, dict.update, dict.get
_get_limit, _set_limit = sys.getrecursionlimit, sys.setrecursionlimit
_get_trace, _set_trace = sys.gettrace, sys.settrace
_get_profile, _set_profile = sys.getprofile, sys.setprofile
# Scripts replace these for good reasons, and automesh does not need them.
_HARMLESS = frozenset({"print", "input", "help", "exit", "quit", "breakpoint", "_"})


class Interpreter:
    """The state of the interpreter when this object was made, and as user code left it."""

    def __init__(self) -> None:
        self._own = _copy(_NAMES)
        self._own_limit = _get_limit()
        self._theirs: tuple[dict[str, Any], int, Any, Any] | None = None

    def restore_own(self) -> None:
        """Restores the interpreter's own state, and keeps the changes of user code for
        `restore_users`.

        No line here may look up a builtin before the names are restored.
        """
        trace, profile = _get_trace(), _get_profile()
        _set_trace(None)
        _set_profile(None)
        self._theirs = (_copy(_NAMES), _get_limit(), trace, profile)
        _update(_NAMES, self._own)
        _set_limit(self._own_limit)

    def restore_users(self) -> None:
        """Restores the state of user code at the last call of `restore_own`."""
        if self._theirs is None:
            return
        names, limit, trace, profile = self._theirs
        self._theirs = None
        if limit > self._own_limit:  # A lower limit helps nobody, and would break later jobs.
            _set_limit(limit)
        _update(_NAMES, names)
        for name in self._own:
            if name not in names:
                _NAMES.pop(name, None)
        if profile is not None:
            _set_profile(profile)
        if trace is not None:
            _set_trace(trace)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The builtins that user code has replaced or removed, without the harmless ones."""
        theirs = self._theirs[0] if self._theirs is not None else _NAMES
        return tuple(
            sorted(
                name
                for name, value in self._own.items()
                if _get(theirs, name) is not value and name not in _HARMLESS
            )
        )
