"""Pickles objects that only the script has, so that a process that does not run the script can read
them (no jax)."""

from __future__ import annotations

import enum
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import cloudpickle

from automesh.package import is_users_file


@contextmanager
def users_modules_by_value() -> Generator[None]:
    """Makes pickle store functions of the user's modules with their code while the body runs. To
    import such a module in another process would make its meshes anew."""
    added: list[Any] = []
    try:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and isinstance(file, str) and is_users_file(file):
                cloudpickle.register_pickle_by_value(module)
                added.append(module)
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def reduced(obj: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns how pickle writes a class of the script, or a member of one of its enumerations of
    texts or numbers; None for anything else.

    Classes are written with their code. Members become the texts or numbers that they are equal to:
    another process would have another class of that name, to whose members they are not.
    """
    if isinstance(obj, enum.Enum) and isinstance(obj, (str, int)) and _is_users(type(obj)):
        return (str, (str.__str__(obj),)) if isinstance(obj, str) else (int, (int(obj),))
    if isinstance(obj, type) and _is_users(obj):
        with users_modules_by_value():
            return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return None


def _is_users(kind: type[Any]) -> bool:
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users_file(file)
