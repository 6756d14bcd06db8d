"""A private layer over the files of this machine: what is written, and what is removed (no jax).

Callers name paths as the program does, and this module knows where each file really is. A file in
the layer hides the real file of the same path; a path that was removed in the layer no longer
exists for the program.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat as stat_of
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# The functions as they are when this module is imported: later, functions that ask this layer have
# their names.
_lstat, _stat, _mkdir, _scandir, _listdir = os.lstat, os.stat, os.mkdir, os.scandir, os.listdir
_rename, _unlink, _rmdir, _makedirs = os.rename, os.unlink, os.rmdir, os.makedirs
_realpath = os.path.realpath
# Folders that anybody may write to, and those of the kernel.
_OPEN_TO_ALL = ("/dev", "/proc", "/sys")
# Caches that programs share, and into which they download.
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "KERAS_HOME", "TFDS_DATA_DIR")
_LARGEST_COPIED = 2**30


class Layer:
    """The files as a program sees them.

    Args:
      root: an empty folder that nobody else uses, for what is written.
      free: folders below which the program reads and writes the files themselves.
    """

    def __init__(self, root: str, free: Iterable[str] = ()) -> None:
        self.root = _realpath(root)
        self.free = [*_OPEN_TO_ALL, self.root, *_caches(), *map(_realpath, free)]
        self._gone: set[str] = set()
        self._changed: dict[str, None] = {}

    @property
    def changed(self) -> tuple[str, ...]:
        """The files that the program has written or removed, in the order in which it did so,
        without those that existed only during the run."""
        return tuple(key for key in self._changed if _exists(key) or _exists(self.private(key)))

    def key(self, path: Any, folder: int | None = None) -> str:
        """Returns the path in full, with all links resolved except for its last part; empty if it
        is outside of this layer.

        Args:
          folder: descriptor of the folder to which a relative path belongs; None for the working
            directory.
        """
        if isinstance(path, int) or path is None:
            return ""
        text = os.fsdecode(path)
        if not text or "\0" in text:
            return ""
        if folder is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        head, tail = os.path.split(os.path.abspath(text))
        key = os.path.join(self._real(head), tail) if tail else head
        key = self._without_root(key)
        return "" if any(key == one or key.startswith(f"{one}/") for one in self.free) else key

    def private(self, key: str) -> str:
        """Returns where the layer keeps what is written to a path."""
        return self.root + key

    def place(self, key: str) -> str:
        """Returns where to read what the program sees at a path; a path that does not exist if it
        sees nothing."""
        private = self.private(key)
        return private if _exists(private) or self._is_gone(key) else key

    def lets_through(self, key: str) -> bool:
        """Whether the program also sees the real file or folder under the layer."""
        return not self._is_gone(key)

    def reading(self, path: Any, folder: int | None = None) -> Any:
        """Returns the real path for one that is only read."""
        key = self.key(path, folder)
        if not key:
            return path
        place = self.place(key)
        if place == key:
            return path
        # A relative link in the layer may point to a file that is not in the layer.
        if os.path.islink(place) and not _exists(_realpath(place)):
            return self.place(self._without_root(_realpath(place))) or place
        return place

    def sees(self, key: str) -> bool:
        """Whether something is there."""
        return _exists(self.place(key))

    def writing(self, path: Any, *, keeps: bool, folder: int | None = None) -> Any:
        """Returns the real path for a file that is to be written.

        Args:
          keeps: whether a part of its content, or its attributes, remain.

        Raises:
          OSError: its folder does not exist, or it is too large to be copied.
        """
        key = self.key(path, folder)
        if not key:
            return path
        target = self._followed(key)
        if not target:
            return path
        self._need_folder(target)
        private = self.private(target)
        if not _exists(private) and not self._is_gone(target) and _exists(target):
            if keeps:
                self._copy_up(target)
            elif not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        self._note(target)
        return private

    def brought(self, key: str) -> str:
        """Returns where the layer keeps a folder that code writes to without asking this layer. It
        holds all that the program sees in it; it is not made if it does not exist yet.

        Raises:
          OSError: a file in it is too large to be copied.
        """
        private = self.private(key)
        _makedirs(os.path.dirname(private), exist_ok=True)
        if not _exists(private) and not self._is_gone(key) and _exists(key):
            self._copy_up(key)
            self._note(key)
        return private

    def mkdir(self, path: Any, mode: int = 0o777, folder: int | None = None) -> bool:
        """Makes a folder; returns False if its path is outside of this layer.

        Raises:
          OSError: as `os.mkdir`.
        """
        key = self.key(path, folder)
        if not key:
            return False
        if self.sees(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        self._need_folder(key)
        _mkdir(self.private(key), mode)
        return True

    def remove(self, path: Any, *, is_folder: bool, folder: int | None = None) -> bool:
        """Removes a file or an empty folder; returns False if its path is outside of this layer.

        Raises:
          OSError: as `os.unlink` and `os.rmdir`.
        """
        key = self.key(path, folder)
        if not key:
            return False
        place = self.place(key)
        status = _lstat(place)
        if is_folder and not stat_of.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
        if not is_folder and stat_of.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if is_folder and any(True for _ in self.names(key)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        if _exists(self.private(key)):
            shutil.rmtree(place) if is_folder else _unlink(place)
        if _exists(key):
            self._gone.add(key)
        self._note(key)
        return True

    def rename(
        self, source: Any, to: Any, source_folder: int | None = None, to_folder: int | None = None
    ) -> bool:
        """Moves a file or a folder; returns False if its path is outside of this layer.

        Raises:
          OSError: as `os.rename`.
        """
        old, new = self.key(source, source_folder), self.key(to, to_folder)
        if not old and not new:
            return False
        if not old:
            # It comes from a folder that the program uses without the layer.
            self._need_folder(new)
            shutil.move(os.fsdecode(source), self.private(new))
        elif not new:
            shutil.copy2(self.place(old), os.fsdecode(to))
            self.remove(source, is_folder=False, folder=source_folder)
        else:
            _lstat(self.place(old))  # raises like `os.rename` if nothing is there
            if os.path.isdir(self.place(new)) and any(True for _ in self.names(new)):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(to))
            self._copy_up(old)
            self._need_folder(new)
            _rename(self.private(old), self.private(new))
            if _exists(old):
                self._gone.add(old)
        for key in (old, new):
            if key:
                if key == new and _exists(key):
                    self._gone.add(key)  # The moved folder hides what lies under it.
                self._note(key)
        return True

    def names(self, key: str) -> Iterator[str]:
        """Yields the names that the program sees in a folder.

        Raises:
          OSError: as `os.listdir`.
        """
        private, found = self.private(key), dict[str, None]()
        if _exists(private):
            found.update(dict.fromkeys(_listdir(private)))
        if not self._is_gone(key) and (not found or os.path.isdir(key)):
            found.update(
                dict.fromkeys(
                    name for name in _listdir(key) if os.path.join(key, name) not in self._gone
                )
                if _exists(key) or not _exists(private)
                else {}
            )
        elif not _exists(private):
            _listdir(private)  # raises
        yield from found

    def visible(self, path: str) -> str:
        """Returns the program's path for a path inside the layer."""
        return self._without_root(path)

    def _real(self, head: str) -> str:
        """Returns a folder with its links resolved: in the layer if it is there, else on the
        machine."""
        private = self.root + head
        return self._without_root(_realpath(private)) if _exists(private) else _realpath(head)

    def _without_root(self, path: str) -> str:
        return path[len(self.root) :] or "/" if path.startswith(f"{self.root}/") else path

    def _is_gone(self, key: str) -> bool:
        while key not in ("", "/"):
            if key in self._gone:
                return True
            key = os.path.dirname(key)
        return False

    def _followed(self, key: str) -> str:
        """Returns the path that a link, or a chain of links, leads to; empty if that is outside of
        this layer."""
        for _ in range(16):
            place = self.place(key)
            if not os.path.islink(place):
                break
            key = self.key(os.path.join(os.path.dirname(place), os.readlink(place)))
        return key

    def _need_folder(self, key: str) -> None:
        head = os.path.dirname(key)
        place = self.place(head)
        if not os.path.isdir(place):
            number = errno.ENOTDIR if _exists(place) else errno.ENOENT
            raise OSError(number, os.strerror(number), key)
        _makedirs(self.private(head), exist_ok=True)

    def _copy_up(self, key: str) -> None:
        """Copies a file or a folder with all its content into the layer."""
        place, private = self.place(key), self.private(key)
        if os.path.isdir(place) and not os.path.islink(place):
            names = list(self.names(key))
            _makedirs(private, exist_ok=True)
            for name in names:
                self._copy_up(os.path.join(key, name))
            return
        if place == private:
            return
        size = _lstat(place).st_size
        if size > _LARGEST_COPIED:
            raise OSError(errno.EFBIG, f"it has {size} bytes, too many to be kept apart", key)
        _makedirs(os.path.dirname(private), exist_ok=True)
        shutil.copy2(place, private, follow_symlinks=False)

    def _note(self, key: str) -> None:
        self._changed.setdefault(key)


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _caches() -> list[str]:
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    home = Path.home()
    usual = [home / ".cache", home / ".keras", home / "tensorflow_datasets"]
    return [_realpath(one) for one in (*named, *map(str, usual))]
