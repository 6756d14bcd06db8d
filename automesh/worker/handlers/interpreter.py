"""What user code may change of the interpreter and the worker's own loop needs: builtins, the limit
of recursion, functions that trace.

While the worker takes an order, words an outcome and sends it, they are as Python made them. User
code finds its own again when it goes on: a script that replaces `print` means it.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

# Bound now: user code may replace these, and the names that `vars` and `dict` stand for.
_NAMES = builtins.__dict__
_copy, _update, _get = dict.copy, dict.update, dict.get
_get_limit, _set_limit = sys.getrecursionlimit, sys.setrecursionlimit
_get_trace, _set_trace = sys.gettrace, sys.settrace
_get_profile, _set_profile = sys.getprofile, sys.setprofile
# Scripts replace them for good reasons, and nothing of ours needs them.
_HARMLESS = frozenset({"print", "input", "help", "exit", "quit", "breakpoint", "_"})


class Interpreter:
    """The interpreter as it was when this was made, and as user code has left it."""

    def __init__(self) -> None:
        self._own = _copy(_NAMES)
        self._own_limit = _get_limit()
        self._theirs: tuple[dict[str, Any], int, Any, Any] | None = None

    def take(self) -> None:
        """Puts everything back that user code has changed, and keeps what it was changed to.

        Nothing here may look a builtin up before the names are put back.
        """
        trace, profile = _get_trace(), _get_profile()
        _set_trace(None)
        _set_profile(None)
        self._theirs = (_copy(_NAMES), _get_limit(), trace, profile)
        _update(_NAMES, self._own)
        _set_limit(self._own_limit)

    def give(self) -> None:
        """Gives user code what it had when `take` was called last."""
        if self._theirs is None:
            return
        names, limit, trace, profile = self._theirs
        self._theirs = None
        if limit > self._own_limit:  # A lower one serves nobody, and would end the jobs to come.
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
        """Builtins that user code has replaced or removed, of those that other code rests on."""
        theirs = self._theirs[0] if self._theirs is not None else _NAMES
        return tuple(
            sorted(
                name
                for name, value in self._own.items()
                if _get(theirs, name) is not value and name not in _HARMLESS
            )
        )
