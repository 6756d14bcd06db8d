"""Stores compiled programs in a folder, so that none is compiled twice (no jax).

One file per program: a header that describes it, with a checksum, then the compressed module with
another one. A file appears whole or not at all, and an unreadable file counts as missing, so that
any number of processes may share the folder and be killed at any instant.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import drafts_in, write_whole
from automesh.jsonio import read_json, to_json
from automesh.limits import ABANDONED_DRAFT_S
from automesh.outcomes import Counts, Effort, Memory, OutOfMemory
from automesh.reading import open_regular, read_bytes
from automesh.texts.user_text import user_path
from automesh.units import parse_bytes

FOLDER_VARIABLE = "AUTOMESH_CACHE"
LIMIT_VARIABLE = "AUTOMESH_CACHE_LIMIT"
DEFAULT_LIMIT_BYTES = 4 * 2**30
_FORMAT = 3  # raised when programs that were stored under unchanged keys must not be used any more
_MAGIC = b"automesh-module\n"
_HEAD = struct.Struct(">I32s")  # length and SHA-256 of the header
_SUFFIX = ".module"
_KEY = re.compile(r"[0-9a-f]{16,128}")  # as `key_of` makes them
_FORMER_DRAFT = ".tmp"  # what former versions began to write


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """The facts that are stored of one compile in addition to the program.

    Attributes:
      memory, counts: None where the compiler gave up.
      compile_s: of building, lowering and compiling.
      target: the target in words: `tpu v5e:4x4`.
      label: the plan that it was first compiled for, as text.
      versions: versions of the packages that compiled it, by name.
      out_of_memory: the outcome if the program needs more memory than there is.
      is_settled: True if the program's outputs are split like its inputs; otherwise the stored
        program is the one that a loop around the step settles to.
    """

    memory: Memory | None
    counts: Counts | None
    compile_s: float
    effort: Effort
    target: str
    label: str
    versions: tuple[tuple[str, str], ...]
    out_of_memory: OutOfMemory | None
    is_settled: bool

    def facts(self) -> dict[str, Any]:
        """Returns the facts by their names, for a class that has more fields."""
        return {one.name: getattr(self, one.name) for one in fields(CompileFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(CompileFacts):
    """The result of one compile.

    Attributes:
      module: serialized HLO module, scheduled; empty where the compiler gave up.
    """

    module: bytes
    out_of_memory: OutOfMemory | None = None
    is_settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEntry:
    """One file of a store.

    Attributes:
      stored: its content without the module.
      size_bytes: of the file.
      used_s: when it was last found or written, seconds since the epoch.
    """

    key: str
    stored: Stored
    size_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header(CompileFacts):
    """The header of a file; the module follows, with `packed_bytes` bytes."""

    key: str
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class ModuleStore:
    """The compiled programs in a folder, by key; new ones replace those that were used least
    recently.

    Attributes:
      folder: created when a program is stored.
      limit_bytes: limit for all files together.
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def find(self, key: str) -> Stored | None:
        """Returns the program stored under `key`; None if there is none that can be read."""
        path = self._path(key)
        try:
            data = read_bytes(path, limit_bytes=limits.MODULE_BYTES)
            header, start = _parse(data)
            if header.key != key or len(data) - start != header.packed_bytes:
                return None
            module = _unpacked(data[start:]) if header.packed_bytes else b""
        except (OSError, ValueError, EOFError, zlib.error, AutomeshError):
            return None
        with contextlib.suppress(OSError):  # The folder may be read-only.
            os.utime(path)
        return Stored(module=module, **header.facts())

    def keep(self, key: str, stored: Stored) -> None:
        """Stores the outcome of a compile, whole or not at all, and makes room for it.

        A program larger than the limit is not stored.

        Raises:
          OSError: the folder cannot be written.
        """
        # Without a time in it, so that equal programs give equal files.
        packed = gzip.compress(stored.module, compresslevel=6, mtime=0) if stored.module else b""
        header = _Header(key=key, packed_bytes=len(packed), **stored.facts())
        head = json.dumps(to_json(header, _Header)).encode()
        start = _MAGIC + _HEAD.pack(len(head), hashlib.sha256(head).digest()) + head
        size = len(start) + len(packed)
        if size > self.limit_bytes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(size, replaced=self._path(key))
        # Without waiting for the disk: a file that a power cut damages is compiled again.
        write_whole(self._path(key), start + packed, lasting=False)

    def packed(self, key: str) -> bytes | None:
        """Returns the file of a program, for another store; None if it cannot be read."""
        if not _KEY.fullmatch(key) or self.find(key) is None:
            return None
        try:
            return read_bytes(self._path(key), limit_bytes=limits.MODULE_BYTES)
        except AutomeshError:
            return None

    def take(self, key: str, data: bytes) -> bool:
        """Stores a file that `packed` of another store has returned.

        Returns:
          False if it is not the whole file of this program, or larger than the limit.

        Raises:
          OSError: the folder cannot be written.
        """
        try:
            header, start = _parse(data)
            if header.packed_bytes:
                _unpacked(data[start:])
        except (ValueError, EOFError, zlib.error, AutomeshError, OSError):
            return False
        whole = header.key == key and len(data) - start == header.packed_bytes
        if not _KEY.fullmatch(key) or not whole or len(data) > self.limit_bytes:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(len(data), replaced=self._path(key))
        write_whole(self._path(key), data, lasting=False)
        return True

    def entries(self) -> tuple[StoreEntry, ...]:
        """Lists all readable entries, the most recently used first."""
        found: list[StoreEntry] = []
        for path, size, used_s in self._files():
            with contextlib.suppress(OSError, ValueError, AutomeshError):
                header = _read_header(path)
                if path == self._path(header.key):
                    found.append(
                        StoreEntry(
                            key=header.key,
                            stored=Stored(module=b"", **header.facts()),
                            size_bytes=size,
                            used_s=used_s,
                        )
                    )
        return tuple(sorted(found, key=lambda entry: (-entry.used_s, entry.key)))

    def size_bytes(self) -> int:
        """Sums the sizes of all files, including unreadable ones."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> int:
        """Removes all files that a store has written.

        Returns:
          The number of programs that were removed.

        Raises:
          OSError: a file cannot be removed.
        """
        paths = [path for path, _, _ in self._files()]
        for path in (*paths, *drafts_in(self.folder), *self._former_drafts()):
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        """Lists every program's file, its size, and when it was last used."""
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # Another process may have removed it to make room.
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_size, status.st_mtime

    def _former_drafts(self) -> Iterator[Path]:
        yield from self.folder.glob(f".*{_FORMER_DRAFT}")

    def _make_room(self, needed_bytes: int, *, replaced: Path) -> None:
        self._remove_unfinished()
        files = [file for file in self._files() if file[0] != replaced]
        taken = needed_bytes + sum(size for _, size, _ in files)
        for path, size, _ in sorted(files, key=lambda file: (file[2], file[0].name)):
            if taken <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            taken -= size

    def _remove_unfinished(self) -> None:
        """Removes unfinished files of killed processes of former versions."""
        for path in self._former_drafts():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_DRAFT_S:
                    path.unlink(missing_ok=True)


def cache_root(environ: Mapping[str, str]) -> Path:
    """Returns `$AUTOMESH_CACHE`, else the user's cache folder.

    The path is absolute, as a script may change its worker's current folder.

    Raises:
      UsageError: $AUTOMESH_CACHE is no path.
    """
    chosen = environ.get(FOLDER_VARIABLE, "").strip()
    try:
        root = user_path(chosen) if chosen else platformdirs.user_cache_path("automesh")
    except UsageError as error:
        raise UsageError(f"${FOLDER_VARIABLE}: {error.message}", hint=error.hint) from None
    return root.absolute()


def default_store(environ: Mapping[str, str]) -> ModuleStore:
    """Opens the store in `cache_root`.

    Raises:
      UsageError: $AUTOMESH_CACHE is no path, or $AUTOMESH_CACHE_LIMIT no size.
    """
    return store_in(cache_root(environ) / "modules", environ)


def store_in(folder: Path, environ: Mapping[str, str]) -> ModuleStore:
    """Opens the store in `folder`, no larger than `$AUTOMESH_CACHE_LIMIT`, else a few GiB.

    Raises:
      UsageError: $AUTOMESH_CACHE_LIMIT is no size.
    """
    text = environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return ModuleStore(folder)
    try:
        return ModuleStore(folder, parse_bytes(text))
    except UsageError as error:
        raise UsageError(f"${LIMIT_VARIABLE}: {error.message}", hint=error.hint) from None


def key_of(
    *,
    fingerprint: str,
    target: object,
    effort: Sequence[tuple[str, object]],
    versions: Sequence[tuple[str, str]],
    environment: Sequence[tuple[str, str]],
) -> str:
    """Returns the key of a compile's outcome: a hash of everything that it depends on.

    Args:
      fingerprint: of the lowered program together with its device assignment and the plan's
        compiler options; the names of axes do not matter in it.
      target: everything that the compiler knows about the devices, as plain JSON values.
      effort: the compiler options that set its effort.
      versions: of all packages that take part in compiling.
      environment: variables and settings that change what gets compiled.
    """
    parts = [_FORMAT, fingerprint, target, *map(sorted, (effort, versions, environment))]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(data: bytes) -> tuple[_Header, int]:
    """Parses the header of a file; returns it, and the offset of the module.

    Raises:
      ValueError: it is no file of a store, or a damaged one.
      AutomeshError: a header of another version.
    """
    begin = len(_MAGIC) + _HEAD.size
    if not data.startswith(_MAGIC) or len(data) < begin:
        raise ValueError("not a module's file")
    length, digest = _HEAD.unpack_from(data, len(_MAGIC))
    head = data[begin : begin + length]
    if hashlib.sha256(head).digest() != digest:
        raise ValueError("a damaged header")
    return read_json(head, _Header), begin + length


def _unpacked(packed: bytes) -> bytes:
    """Decompresses a module that `keep` has written.

    Raises:
      ValueError: it is incomplete, or unpacks to more than a module can have.
      OSError, zlib.error: it is no packed module.
    """
    # In pieces, since one large read would reserve its whole length at once.
    pieces: list[bytes] = []
    left_bytes = limits.MODULE_BYTES
    with gzip.open(io.BytesIO(packed)) as file:
        while piece := file.read(limits.CHUNK_BYTES):
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise ValueError("a module that is too large")
            pieces.append(piece)
    return b"".join(pieces)


def _read_header(path: Path) -> _Header:
    """Reads the header of a file, and checks the length of the file.

    Raises:
      OSError: it cannot be read.
      ValueError, AutomeshError: as `_parse`.
    """
    with open_regular(path) as file:
        data = file.read(len(_MAGIC) + _HEAD.size)
        if len(data) == len(_MAGIC) + _HEAD.size:
            length = _HEAD.unpack_from(data, len(_MAGIC))[0]
            data += file.read(min(length, limits.STORED_HEADER_BYTES))
        header, start = _parse(data)
        if os.fstat(file.fileno()).st_size != start + header.packed_bytes:
            raise ValueError("a torn file")
    return header
