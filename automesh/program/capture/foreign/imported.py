"""Changes libraries when a script imports them (no jax)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


@contextmanager
def changed_when_imported(changes: Mapping[str, Change]) -> Generator[None]:
    """Changes modules by their names: the imported ones now, and the others when the body imports
    them, before the importing code goes on.

    The changes stay after the body.
    """
    finder = _Finder(changes)
    sys.meta_path.insert(0, finder)
    try:
        for name, change in changes.items():
            if name in sys.modules:
                change(sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """An import finder that finds what other finders find, and changes the module after its
    import."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes
        self._is_looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of a module, as a finder in `sys.meta_path` does."""
        del path, target
        change = self._changes.get(name)
        if change is None or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec
