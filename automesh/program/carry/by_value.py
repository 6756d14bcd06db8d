"""Pickles objects that only the script has, so that a process that does not run the script can read
them (no jax)."""

from __future__ import annotations

import enum
import operator
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


_REDUCE_EX = object.__reduce_ex__
_TUPLE: Any = tuple


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """Returns how pickle writes a class of the script, or a member of one of its enumerations of
    texts or numbers; None for anything else.

    Classes are written with their code. Members become the texts or numbers that they are equal to:
    another process would have another class of that name, to whose members they are not. Tuples
    whose class takes its elements one by one are made in that way again.
    """
    if isinstance(obj, enum.Enum) and isinstance(obj, (str, int)) and _is_users(type(obj)):
        return (str, (str.__str__(obj),)) if isinstance(obj, str) else (int, (int(obj),))
    if isinstance(obj, type) and _is_users(obj):
        with users_modules_by_value():
            return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return tuple_of_arguments(obj)


def tuple_of_arguments(obj: Any) -> tuple[Any, ...] | None:
    """Returns how pickle writes a tuple whose class takes its elements one by one, as a named tuple
    does, but does not say so to pickle: it would be read as a tuple of one tuple. Returns None for
    any other object.

    Factors of a sharding rule of jax's `custom_partitioning` are such tuples.
    """
    kind: Any = type(obj)
    if not isinstance(obj, tuple) or kind.__new__ is tuple.__new__:
        return None
    if kind.__getnewargs__ is not _TUPLE.__getnewargs__ or kind.__reduce_ex__ is not _REDUCE_EX:
        return None
    elements: tuple[Any, ...] = tuple(obj)  # pyright: ignore[reportUnknownVariableType]
    if _takes_all_at_once(kind, elements):
        return None
    return kind, elements, getattr(obj, "__dict__", None) or None


def _takes_all_at_once(kind: Any, elements: tuple[Any, ...]) -> bool:
    try:
        again = kind.__new__(kind, elements)
    except Exception:  # noqa: BLE001 - it is not our class, and may refuse in its own way
        return False
    return len(again) == len(elements) and all(map(operator.is_, again, elements))


def _is_users(kind: type[Any]) -> bool:
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users_file(file)
