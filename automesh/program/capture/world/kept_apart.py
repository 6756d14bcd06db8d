"""Keeps the files that a script writes while it is run up to its step in a private layer, which is
removed after the run.

The run changes and removes nothing that was there before, and the next run finds the same files as
the first one. What Python code opens, makes, moves and removes goes through the layer (`layer`): in
`open`, in `os` and in what uses them, such as `pathlib`, `shutil`, `zipfile` and `numpy`. Code in C
or C++ does not call these functions: `capture.foreign` leads some of it to the layer, and a folder
that `tempfile.mkdtemp` makes is a real one, which is removed at the end. An audit hook refuses what
avoids the layer and would change a file that was there before (no jax).
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from automesh.package import KEPT_APART
from automesh.program.capture.world.layer import Layer
from automesh.program.capture.world.threads import end_foreign_thread
from automesh.program.capture.world.told import tell

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of `os` whose first argument is a path that they only read.
_READING = (
    "stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf",
)  # fmt: skip
# Functions that change something about a file besides its content.
_CHANGING = ("chmod", "lchmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
_AUDITED = frozenset(
    {"open", "os.remove", "os.rename", "os.rmdir", "os.truncate", "sqlite3.connect"}
)
# Names of the files in jax's cache of compiled programs, in a folder that the script names.
_COMPILED = re.compile(r"-[0-9a-f]{64}-(cache|atime)$")
_PARTS_SHOWN = 4  # of a path outside of the folder of the script: `/tmp/runs/log.txt`
_SHOWN = 3


@dataclass(slots=True)
class _FilesState:
    """The layer that this process uses.

    Attributes:
      layer: the layer in force; None while no script is run.
      real: the original functions of `os` and `io`.
      at_work: whether this thread is inside a function of automesh, which works on the real files.
    """

    layer: Layer | None = None
    real: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    at_work: threading.local = field(default_factory=threading.local)
    made: list[str] = field(default_factory=list[str])


_STATE = _FilesState()


@contextmanager
def kept_apart() -> Generator[None]:
    """Keeps what the body writes apart from the files of this machine, and removes it at the
    end."""
    _install()
    root = tempfile.mkdtemp(prefix=KEPT_APART)
    layer = Layer(root, free=_own_folders())
    opened, made, here = builtins.open, len(_STATE.made), os.getcwd()
    _STATE.layer = layer
    builtins.open = io.open
    try:
        yield
    finally:
        _STATE.layer, builtins.open = None, opened
        os.chdir(here)
        changed = tuple(one for one in layer.changed if not _COMPILED.search(one))
        for folder in (*_STATE.made[made:], root):
            shutil.rmtree(folder, ignore_errors=True)
        del _STATE.made[made:]
        if changed:
            tell(_in_words(changed))


def forget_layer() -> None:
    """Removes what was written; for a process that is about to end."""
    layer, _STATE.layer = _STATE.layer, None
    for folder in (*_STATE.made, *([layer.root] if layer is not None else [])):
        shutil.rmtree(folder, ignore_errors=True)


def path_for(path: Any, mode: str) -> Any:
    """Returns the real path that code in C or C++ shall open for a path of the script, in a mode of
    `open`."""
    layer = _layer()
    if layer is None:
        return path
    with among_real_files():
        return _place_to_open(layer, path, mode)


def folder_for(path: str, *, writes: bool) -> str:
    """Returns the real path of a folder that code in C or C++ shall open. A folder that is written
    to holds all that the program sees in it.

    Raises:
      OSError: a file in it is too large to be copied.
    """
    layer = _layer()
    if layer is None:
        return path
    with among_real_files():
        end = "/" if path.endswith("/") else ""
        bare = path.rstrip("/") or "/"
        key = layer.key(bare)
        if not key:
            return path
        if layer.sees(key) and not writes:
            return str(layer.reading(bare)) + end
        return layer.brought(key) + end


def _in_words(changed: tuple[str, ...]) -> str:
    here = os.getcwd()
    names = [
        os.path.relpath(one, here) if one.startswith(f"{here}/") else _tail(one) for one in changed
    ]
    listed = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the script wanted to write or remove {listed}{more}: kept apart in a private folder, "
        "which is removed after each run"
    )


def _tail(path: str) -> str:
    """Returns the last two parts of a long path; a short one as it is."""
    parts = path.split("/")
    return path if len(parts) <= _PARTS_SHOWN else "/".join(("...", *parts[-2:]))


def _own_folders() -> list[str]:
    """Returns the folders in which automesh itself and jax write while a script is run."""
    found = [os.environ.get("JAX_COMPILATION_CACHE_DIR", "")]
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        found.append(str(getattr(jax.config, "jax_compilation_cache_dir", None) or ""))
    return [one for one in found if one]


@contextmanager
def among_real_files() -> Generator[None]:
    """Lets the body, which is automesh's own work, see and change the real files."""
    before = getattr(_STATE.at_work, "yes", False)
    _STATE.at_work.yes = True
    try:
        yield
    finally:
        _STATE.at_work.yes = before


def _layer() -> Layer | None:
    """Returns the layer that this thread uses; None if it works on the real files."""
    if getattr(_STATE.at_work, "yes", False):
        return None
    if _STATE.layer is None:
        end_foreign_thread()
    return _STATE.layer


def _install() -> None:
    if _STATE.real:
        return
    _replace(io, "open", _opening)
    _replace(os, "open", _descriptor)
    for name in _READING:
        _replace(os, name, _reading)
    for name in _CHANGING:
        _replace(os, name, _changing)
    _replace(os, "chdir", _changing_folder)
    _replace(os, "mkdir", _mkdir)
    for name in ("remove", "unlink", "rmdir"):
        _replace(os, name, functools.partial(_removing, is_folder=name == "rmdir"))
    for name in ("rename", "replace"):
        _replace(os, name, _renaming)
    for name in ("link", "symlink"):
        _replace(os, name, _linking)
    _replace(os, "listdir", _listing)
    _replace(os, "scandir", _scanning)
    _replace(os, "getcwd", _working_folder)
    _replace(tempfile, "mkdtemp", _temporary)
    # `shutil.rmtree` would use descriptors of folders, which belong to the real files.
    _replace(shutil, "rmtree", _by_paths)
    _rebind_temporary_files()
    sys.addaudithook(_audit)


def _rebind_temporary_files() -> None:
    """Replaces the function that removes temporary files, which their methods keep as a default
    argument."""
    closer: Any = getattr(tempfile, "_TemporaryFileCloser", None)
    original = _STATE.real["os.unlink"]
    for method in vars(closer).values() if closer is not None else ():
        defaults: Any = getattr(method, "__defaults__", None)
        if defaults and original in defaults:
            method.__defaults__ = tuple(os.unlink if one is original else one for one in defaults)


def _replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # Not on this system.
        return
    _STATE.real[f"{owner.__name__}.{name}"] = original

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        layer = _layer()
        if layer is None:
            return original(*args, **kwargs)
        with among_real_files():
            return instead(layer, original, *args, **kwargs)

    setattr(owner, name, call)
    # `os` and `shutil` look up here which functions take descriptors.
    for group in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in group:
            group.add(call)


def _named(given: Any, error: OSError) -> OSError:
    """Returns the error with the path that the program has named."""
    if error.filename is not None:
        error.filename = given
    return error


def _opening(
    layer: Layer, original: Any, file: Any, mode: Any = "r", *args: Any, **more: Any
) -> Any:
    opener = more.get("opener") or (args[4] if len(args) > 4 else None)
    if isinstance(file, int) or opener is not None or not isinstance(mode, str):
        _STATE.at_work.yes = False  # An opener is code of the program.
        try:
            return original(file, mode, *args, **more)
        finally:
            _STATE.at_work.yes = True
    try:
        place = _place_to_open(layer, file, mode)
        return original(place, mode, *args, **more)
    except OSError as error:
        raise _named(file, error) from None


def _place_to_open(layer: Layer, file: Any, mode: str) -> Any:
    if not set(mode) & set("wax+"):
        return layer.reading(file)
    key = layer.key(file)
    if "x" in mode and key and layer.sees(key):
        return layer.place(key)  # which is refused
    if "r" in mode and key and not layer.sees(key):
        return layer.private(key)
    return layer.writing(file, keeps="w" not in mode and "x" not in mode)


def _descriptor(
    layer: Layer, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
) -> int:
    try:
        if not flags & _WRITES:
            place = layer.reading(path, dir_fd)
        else:
            key = layer.key(path, dir_fd)
            is_there = bool(key) and layer.sees(key)
            if key and is_there and flags & os.O_EXCL and flags & os.O_CREAT:
                place = layer.place(key)
            elif key and not is_there and not flags & os.O_CREAT:
                place = layer.private(key)
            else:
                place = layer.writing(path, keeps=not flags & os.O_TRUNC, folder=dir_fd)
        return original(place, flags, mode, dir_fd=dir_fd if place is path else None)
    except OSError as error:
        raise _named(path, error) from None


def _reading(layer: Layer, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    place = layer.reading(path, kwargs.get("dir_fd"))
    if place is not path:
        kwargs.pop("dir_fd", None)
    try:
        return original(place, *args, **kwargs)
    except OSError as error:
        raise _named(path, error) from None


def _changing_folder(layer: Layer, original: Any, path: Any) -> None:
    key = layer.key(path)
    # Changes to the real folder where there is one, as code in C++ looks for its files there.
    is_there = bool(key) and layer.lets_through(key) and os.path.isdir(key)
    original(key if is_there else layer.reading(path))


def _changing(layer: Layer, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    key = layer.key(path, kwargs.get("dir_fd"))
    if key and not layer.sees(key):
        raise FileNotFoundError(2, os.strerror(2), path)
    place = layer.writing(path, keeps=True, folder=kwargs.get("dir_fd"))
    if place is not path:
        kwargs.pop("dir_fd", None)
    return original(place, *args, **kwargs)


def _mkdir(
    layer: Layer, original: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None
) -> None:
    if not layer.mkdir(path, mode, dir_fd):
        original(path, mode, dir_fd=dir_fd)


def _removing(
    layer: Layer, original: Any, path: Any, *, is_folder: bool, dir_fd: int | None = None
) -> None:
    try:
        if not layer.remove(path, is_folder=is_folder, folder=dir_fd):
            original(path, dir_fd=dir_fd)
    except OSError as error:
        raise _named(path, error) from None


def _renaming(
    layer: Layer,
    original: Any,
    src: Any,
    dst: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
) -> None:
    key = layer.key(dst, dst_dir_fd)
    # A file may replace a file.
    if key and layer.sees(key) and not os.path.isdir(layer.place(key)):
        layer.remove(dst, is_folder=False, folder=dst_dir_fd)
    if not layer.rename(src, dst, src_dir_fd, dst_dir_fd):
        original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def _linking(layer: Layer, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
    key = layer.key(dst, kwargs.get("dir_fd", kwargs.get("dst_dir_fd")))
    if key and layer.sees(key):
        raise FileExistsError(17, os.strerror(17), dst)
    to = layer.writing(dst, keeps=False)
    is_hard = original is _STATE.real["os.link"]
    original(layer.reading(src) if is_hard else src, to, *args, **kwargs)


def _listing(layer: Layer, original: Any, path: Any = ".") -> Any:
    key = layer.key(path)
    if not key:
        return original(path)
    try:
        names = list(layer.names(layer.key(layer.place(key)) or key))
    except OSError as error:
        raise _named(path, error) from None
    return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names


class _Entry:
    """As `os.DirEntry`."""

    def __init__(self, folder: str, name: str, place: str) -> None:
        self.name, self.path, self._place = name, os.path.join(folder, name), place

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino


class _Entries:
    """As what `os.scandir` gives."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _scanning(layer: Layer, original: Any, path: Any = ".") -> Any:
    if isinstance(path, bytes) or not layer.key(path):
        return original(path)
    key = layer.key(path)
    try:
        names = list(layer.names(key))
    except OSError as error:
        raise _named(path, error) from None
    folder = os.fspath(path)
    return _Entries([_Entry(folder, name, layer.place(os.path.join(key, name))) for name in names])


def _working_folder(layer: Layer, original: Any) -> str:
    return layer.visible(original())


def _temporary(layer: Layer, original: Any, *args: Any, **kwargs: Any) -> str:
    """Makes a real folder: it was not there before, and code in C++ can use it, too."""
    made = original(*args, **kwargs)
    layer.free.append(os.path.realpath(made))
    _STATE.made.append(made)
    return made


def _by_paths(layer: Layer, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    del layer
    inside: Any = shutil
    before, inside._use_fd_functions = inside._use_fd_functions, False
    _STATE.at_work.yes = False
    try:
        return original(path, *args, **kwargs)
    finally:
        inside._use_fd_functions, _STATE.at_work.yes = before, True


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Refuses what avoids the layer and would change a file that was there before."""
    if event not in _AUDITED or _STATE.layer is None or getattr(_STATE.at_work, "yes", False):
        return
    if event == "open":
        path, _, flags = args
        if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            return
    else:
        path = args[1] if event == "os.rename" else args[0]
    layer = _STATE.layer
    with among_real_files():
        key = layer.key(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not key or "__pycache__" in key or not os.path.isfile(key):
            return
        text = os.fsdecode(path)
    raise PermissionError(1, "automesh lets no captured run change what was there before", text)
