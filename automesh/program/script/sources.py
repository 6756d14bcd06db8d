"""Hashes the files of the user's own code and records what else it reads (no jax).

A worker that inspects a script records which files, environment variables and installed packages
the script reads while it is loaded and built, so that a later search can find what has changed.
Files are seen by Python's audit hook (PEP 578), but not those that a library opens outside of
Python.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from automesh.package import INSTALLED, KEPT_APART, TEMPORARY_MARK, our_folders
from automesh.reading import Unreadable, open_regular
from automesh.texts.terminal import is_unicode

MOST_FILES = 512
_SYSTEM = tuple(map(Path, ("/proc", "/sys", "/dev", "/etc", "/run", "/usr/lib", "/usr/share")))
_COMPILED = (".pyc", ".so", ".pyd")
_WRITES = os.O_WRONLY | os.O_RDWR
# Modules of Python between user code and a read of `os.environ`.
_BETWEEN = ("os", "_collections_abc", "collections.abc")
_OWN_DISTRIBUTION = "jax-automesh"
_HASHED_BYTES = 256 * 2**20

Sources = tuple[tuple[str, str], ...]
"""(path, hash of the content) of each file."""


def hash_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, as hexadecimal digits.

    Raises:
      Unreadable: it is missing, or no regular file: a named pipe would block for ever.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of_content(path: Path) -> str:
    """Hashes a file's content; of a very large file, its size and time. Empty if the file is
    missing or unreadable."""
    try:
        status = path.stat()
        if status.st_size <= _HASHED_BYTES:
            return hash_of_file(path)
    except (OSError, Unreadable):
        return ""
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode()).hexdigest()


def hash_of_sources(sources: Sources) -> str:
    """Returns one hash of all files' names and contents, but not of their folders."""
    digest = hashlib.sha256()
    for path, inside in sources:
        digest.update(os.fsencode(Path(path).name) + b"\0" + bytes.fromhex(inside))
    return digest.hexdigest()[:32]


def edited_files(sources: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the paths of the files that have changed or are missing."""
    return tuple(path for path, inside in sources if hash_of_content(Path(path)) != inside)


# TensorFlow's AutoGraph writes generated functions to temporary files and imports them
# (tensorflow/python/autograph/pyct/loader.py, 2.21).
_GENERATED = "__autograph_generated_file"


def is_users(path: Path, roots: Collection[Path]) -> bool:
    """Whether a file is the user's own: in none of Python's and automesh's folders.

    Args:
      path: resolved path of the file.
      roots: folders of the user. A virtual environment in one of them is not part of it; a root
        inside of Python's own folder is.
    """
    is_ours = any(path.is_relative_to(folder) for folder in our_folders())
    if is_ours or any(part in INSTALLED for part in path.parts):
        return False
    if path.name.startswith(_GENERATED) or any(one.startswith(KEPT_APART) for one in path.parts):
        return False
    inside = [root for root in roots if path.is_relative_to(root)]
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return not any(
        path.is_relative_to(prefix) and not any(root.is_relative_to(prefix) for root in inside)
        for prefix in prefixes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The things that user code has read.

    Attributes:
      files: opened files other than its own modules, each with the hash of its content; empty for a
        missing file.
      variables: environment variables, each with the hash of its value; empty if it is not set.
      distributions: imported installed packages, with their versions.
    """

    files: Sources = ()
    variables: tuple[tuple[str, str], ...] = ()
    distributions: tuple[tuple[str, str], ...] = ()


NOTHING_READ = Reads()


@dataclass(slots=True)
class Watch:
    """Records what user code has read since the process began to watch."""

    modules: frozenset[str]
    is_on: bool = False
    opened: dict[str, None] = field(default_factory=dict[str, None])
    written: set[str] = field(default_factory=set[str])
    asked: Counter[str] = field(default_factory=Counter[str])

    def note_open(self, name: object, flags: object) -> None:
        """Records an opened file; is called by the hook, which must not raise."""
        if not isinstance(name, (str, bytes, os.PathLike)):
            return
        try:
            path = str(Path(os.fsdecode(name)).absolute())
        except (OSError, ValueError):  # No working directory, or an invalid name.
            return
        if isinstance(flags, int) and flags & _WRITES:
            self.written.add(path)
        elif len(self.opened) < 64 * MOST_FILES:
            self.opened[path] = None

    def reads(self, roots: Collection[Path], code: Sources) -> Reads:
        """Returns what user code has read, without reads that do not matter.

        Args:
          roots: folders of the user.
          code: files of the user's modules, which are not repeated here.
        """
        known = {path for path, _ in code}
        paths: dict[str, None] = {}
        for name in (*self.opened,):
            path = _resolved(name)
            if (
                path is not None
                and str(path) not in known
                and name not in self.written
                and path.suffix not in _COMPILED
                and not path.is_dir()
                and not any(path.is_relative_to(folder) for folder in _SYSTEM)
                and not (path.parent / TEMPORARY_MARK).exists()
                and is_users(path, roots)
            ):
                paths[str(path)] = None
        files = tuple((name, hash_of_content(Path(name))) for name in sorted(paths)[:MOST_FILES])
        return Reads(
            files=files,
            variables=self._variables(),
            distributions=_distributions(set(sys.modules) - self.modules),
        )

    def _variables(self) -> tuple[tuple[str, str], ...]:
        # A copy of the whole environment reads each variable once, which does not count.
        least = min((self.asked[name] for name in os.environ), default=0)
        names = {name for name, times in self.asked.items() if times > least * (name in os.environ)}
        found = {name: os.environ.get(name) for name in sorted(names)}
        return tuple(
            (name, "" if value is None else hashlib.sha256(os.fsencode(value)).hexdigest())
            for name, value in found.items()
        )


def _resolved(name: str) -> Path | None:
    """Resolves a path; None if it is invalid or cannot be stored in a study."""
    try:
        path = Path(name).resolve()
    except (OSError, RuntimeError, ValueError):  # A link to itself, or a NUL.
        return None
    return path if is_unicode(str(path)) else None


_LOCK = threading.Lock()
_watches: list[Watch] = []


@contextmanager
def watching() -> Generator[Watch]:
    """Records what user code reads while the body runs; keeps earlier records."""
    watch = _begun()
    watch.is_on = True
    try:
        yield watch
    finally:
        watch.is_on = False


def _begun() -> Watch:
    with _LOCK:
        if not _watches:
            watch = Watch(modules=frozenset(sys.modules))
            _watches.append(watch)
            sys.addaudithook(_hook(watch))
            _watch_environment(watch)
        return _watches[0]


def _hook(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    # Python calls it for many kinds of events until the process ends, so it must be fast.
    def hear(event: str, args: tuple[Any, ...]) -> None:
        if watch.is_on and event == "open":
            watch.note_open(args[0], args[2])

    return hear


def _watch_environment(watch: Watch) -> None:
    """Counts the reads of `os.environ` by user code, all of which end in one method."""
    plain = type(os.environ)

    class WatchedEnviron(plain):
        def __getitem__(self, key: str) -> str:
            if watch.is_on and _is_asked_by_user():
                watch.asked[key] += 1
            return plain.__getitem__(self, key)

    WatchedEnviron.__name__, WatchedEnviron.__qualname__ = plain.__name__, plain.__qualname__
    os.environ.__class__ = WatchedEnviron


def _is_asked_by_user() -> bool:
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and _is_users_code(frame.f_code.co_filename)


_users_code: dict[str, bool] = {}


def _is_users_code(file: str) -> bool:
    if file not in _users_code:
        is_file = not file.startswith("<")
        _users_code[file] = is_file and is_users(Path(file).resolve(), (Path.cwd().resolve(),))
    return _users_code[file]


def _distributions(modules: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Returns the installed packages that modules belong to, with their versions."""
    top = {name.partition(".")[0] for name in modules}
    names = {one.metadata["Name"] for one in metadata.distributions() if _holds(one, top)}
    return tuple((name, metadata.version(name)) for name in sorted(names - {_OWN_DISTRIBUTION}))


def _holds(distribution: metadata.Distribution, top: set[str]) -> bool:
    """Whether a distribution contains one of these top-level modules.

    Like `importlib.metadata.packages_distributions`, which checks every installed file and takes
    more than a second.
    """
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return not top.isdisjoint(declared)
    recorded = distribution.read_text("RECORD")
    if recorded is None:
        return any(_module_of(str(path)) in top for path in distribution.files or ())
    lines = recorded.splitlines()
    paths = (
        (row[0] for row in csv.reader(lines) if row)
        if '"' in recorded
        else (line.partition(",")[0] for line in lines)
    )
    return any(
        _module_of(path) in top and Path(str(distribution.locate_file(path))).exists()
        for path in paths
    )


def _module_of(path: str) -> str:
    """Returns the top-level module of a file in a distribution; empty if there is none."""
    folder, separator, _ = path.partition("/")
    name = folder if separator else (inspect.getmodulename(path) or "")
    return "" if "." in name else name
