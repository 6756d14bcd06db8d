"""Makes libraries in C and C++ read and write files in the private layer while a script is run (no
jax).

HDF5, safetensors, SQLite and tensorstore do not open files by `open` and `os`. So their functions
get the paths in the layer for the paths that the script names. Orbax, and the functions of jax that
serialize arrays, write with tensorstore. Its specification names a folder by JSON with `"driver":
"file"` and a path, at any depth, or by a text `file:///...`. Checked with tensorstore 0.1.86.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from automesh.program.capture.foreign.imported import Change, changed_when_imported
from automesh.program.capture.world.kept_apart import (
    among_real_files,
    folder_for,
    path_for,
)

# Functions that take the path of a file, by module: the position of the path, and the mode in which
# the function always opens it.
_WITH_PATHS: dict[str, dict[str, tuple[int, str]]] = {
    "safetensors.numpy": {"save_file": (1, "w"), "load_file": (0, "r")},
    "safetensors.flax": {"save_file": (1, "w"), "load_file": (0, "r")},
    "safetensors.torch": {"save_file": (1, "w"), "load_file": (0, "r")},
    "sqlite3": {"connect": (0, "a")},
    "sqlite3.dbapi2": {"connect": (0, "a")},
}
_URL = "file://"


_CHANGED: set[str] = set()


@contextmanager
def led_to_layer() -> Generator[None]:
    """Makes HDF5, safetensors, SQLite and tensorstore read and write in the layer while the body
    runs.

    Their functions stay changed: a thread of the script that is still running after the run finds
    no layer, and is ended there.
    """
    changes = {
        name: functools.partial(_once, change)
        for name, change in {
            "h5py": _lead_hdf5,
            "tensorstore": _lead_tensorstore,
            **dict.fromkeys(_WITH_PATHS, _lead_functions),
        }.items()
    }
    with changed_when_imported(changes):
        yield


def _once(change: Change, module: ModuleType) -> None:
    if module.__name__ not in _CHANGED:
        _CHANGED.add(module.__name__)
        change(module)


def _lead_functions(module: ModuleType) -> None:
    for name, (position, mode) in _WITH_PATHS[module.__name__].items():
        if hasattr(module, name):
            setattr(module, name, _with_path(getattr(module, name), position, mode))


def _lead_hdf5(module: ModuleType) -> None:
    owner: Any = module.File  # The mode follows the path.
    owner.__init__ = _with_path(owner.__init__, 1, 2)


def _with_path(original: Callable[..., Any], position: int, mode: str | int) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        said = mode
        if isinstance(said, int):
            given = args[said] if len(args) > said else kwargs.get("mode")
            said = given if isinstance(given, str) else "r"
        if len(args) > position and not _is_no_file(args[position]):
            place = path_for(args[position], said)
            args = (*args[:position], place, *args[position + 1 :])
        with among_real_files():
            return original(*args, **kwargs)

    return call


def _is_no_file(path: Any) -> bool:
    """Whether SQLite takes a text for something else than a path. If it opens a real file all the
    same, the audit hook sees that."""
    return isinstance(path, str) and (path in ("", ":memory:") or path.startswith("file:"))


def _lead_tensorstore(module: ModuleType) -> None:
    inside: Any = module
    inside.open = _with_spec(inside.open, inside.Spec, writes=False)
    store = inside.KvStore
    # What is opened in this way may be written to, whatever the arguments say.
    store.open = staticmethod(_with_spec(store.open, store.Spec, writes=True))


def _with_spec(original: Callable[..., Any], kind: type[Any], *, writes: bool) -> Any:
    @functools.wraps(original)
    def call(spec: Any, *args: Any, **said: Any) -> Any:
        stated = spec.to_json() if isinstance(spec, kind) else spec
        led = with_places(stated, writes=writes or _creates(said) or _creates(stated))
        return original(spec if led == stated else led, *args, **said)

    return call


def _creates(said: Any) -> bool:
    flags = ("create", "delete_existing", "write")
    return isinstance(said, dict) and any(said.get(name) for name in flags)


def with_places(spec: Any, *, writes: bool) -> Any:
    """Returns a specification of tensorstore with the paths in the layer for its folders.

    Raises:
      OSError: a file that is to be written to is too large to be copied.
    """
    if isinstance(spec, str) and spec.startswith(_URL):
        path, bar, rest = spec[len(_URL) :].partition("|")
        return _URL + folder_for(path, writes=writes) + bar + rest
    if isinstance(spec, list):
        return [with_places(one, writes=writes) for one in spec]
    if not isinstance(spec, dict):
        return spec
    led = {key: with_places(value, writes=writes) for key, value in spec.items()}
    if led.get("driver") == "file" and isinstance(led.get("path"), str):
        led["path"] = folder_for(led["path"], writes=writes)
    return led
