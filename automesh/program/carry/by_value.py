"""Pickles objects that only the script has, so that a process that does not run the script can read
them (no jax)."""

from __future__ import annotations

import enum
import functools
import importlib
import io
import operator
import pickle
import sys
import types
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
    how = tuple_of_arguments(obj)
    return answers_for_all(obj) if how is None else how


_REDUCE_EX = object.__reduce_ex__
_TUPLE: Any = tuple
_PLAIN = (object, dict, list)
"""Classes whose objects are whole with their elements, items and attributes."""
_OF_PICKLE = {
    *("__new__", "__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
}
"""What the class of another object says about how its objects are made or pickled."""


def answers_for_all(obj: Any) -> tuple[Any, ...] | None:
    """Returns how pickle writes an object whose class has a function for attributes that it does
    not have (`__getattr__`), as a wrapper of an array or a dictionary of settings; None for any
    other object, and if its class says itself how it is pickled.

    Pickle asks such an object for its own methods before it has its attributes again: the function
    looks for them in turn, and does not end, or raises what pickle does not expect.
    """
    kind = type(obj)
    if isinstance(obj, (type, types.ModuleType)) or not _is_users(kind):
        return None
    defined = {name for base in kind.__mro__ if base not in _PLAIN for name in vars(base)}
    if "__getattr__" not in defined or defined & _OF_PICKLE:
        return None
    state = dict(object.__getattribute__(obj, "__dict__"))
    elements = iter(list.__iter__(obj)) if isinstance(obj, list) else None
    items = iter(dict.items(obj)) if isinstance(obj, dict) else None
    return _blank, (kind,), state, elements, items, _fill_object


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)


def _fill_object(obj: Any, state: dict[str, Any]) -> None:
    object.__getattribute__(obj, "__dict__").update(state)


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


def library_function(obj: Any) -> tuple[Any, ...] | None:
    """Returns how pickle writes a function that a library has made of one of the script's, as
    `jax.checkpoint` does; None for any other object.

    Such a function says that it is the script's (`functools.wraps`), but its code uses the names of
    the library's module, which the reader has as well. cloudpickle would write what those names
    stand for, and a cache of jax cannot be written.
    """
    if type(obj) is not types.FunctionType:
        return None
    names = obj.__globals__
    module = sys.modules.get(str(names.get("__name__")))
    if module is None or vars(module) is not names or _is_found_by_name(obj):
        return None
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or is_users_file(file):
        return None
    state = {
        "__defaults__": obj.__defaults__,
        "__kwdefaults__": obj.__kwdefaults__,
        "__name__": obj.__name__,
        "__qualname__": obj.__qualname__,
        "__module__": obj.__module__,
        "__doc__": obj.__doc__,
    }
    cells = [_content(cell) for cell in obj.__closure__ or ()]
    made = (module.__name__, obj.__code__)
    return _function_of, made, (state, dict(vars(obj)), cells), None, None, _fill_function


def _is_found_by_name(obj: Any) -> bool:
    """Whether another process finds a function in its module by its name."""
    found: Any = sys.modules.get(obj.__module__ or "")
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # The variable has no value yet.
        return ()


def _function_of(module: str, code: types.CodeType) -> types.FunctionType:
    """Makes a function of a library again, whose variables from outside have no values yet: they
    may refer to the function itself."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    names = vars(importlib.import_module(module))
    return types.FunctionType(code, names, None, None, cells)


def _fill_function(function: Any, state: Any) -> None:
    attributes, members, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(members)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            (cell.cell_contents,) = content


def cached_function(obj: Any) -> tuple[Any, ...] | None:
    """Returns how pickle writes a function of the script under `functools.cache` or `lru_cache`;
    None for any other object. Pickle alone writes its name, which only the script's process has."""
    if not isinstance(obj, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
        return None
    function: Any = obj.__wrapped__
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if isinstance(file, str) and not is_users_file(file) and _is_found_by_name(obj):
        return None
    settings = obj.cache_parameters()
    return _cached, (function, settings["maxsize"], settings["typed"])


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


class NotCarried:
    """An object that stands for one of the script that no other process can have, such as a lock,
    a generator or an open file: a step's function may hold it, and raises an error if it uses it.

    Attributes of it stand for themselves in the same way: others hold them, as a condition holds
    the methods of its lock.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Of a protocol that it does not have.
            raise AttributeError(name)
        return NotCarried(f"{self._kind}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"the step uses a `{self._kind}` of the script")

    def __bool__(self) -> bool:
        raise TypeError(f"the step uses a `{self._kind}` of the script")


def written_or_left_out(obj: Any, has_own_way: bool) -> Any:
    """Returns how pickle writes an object: by its class's own method, or by a `NotCarried` if that
    says that it cannot; NotImplemented if pickle does not ask the class.

    Args:
      has_own_way: whether the pickler has a function for this class.
    """
    if isinstance(obj, io.IOBase):
        return NotCarried, (type(obj).__name__,)
    if has_own_way or isinstance(obj, (type, types.FunctionType, types.ModuleType)):
        return NotImplemented
    try:
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except TypeError as error:
        if not str(error).startswith("cannot pickle"):
            raise
        return NotCarried, (type(obj).__name__,)


def _is_users(kind: type[Any]) -> bool:
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users_file(file)
