"""A bundle: the folder of a script as one tar, named by the hash of its bytes.

The side that unpacks does not trust the side that packs. A tar may name files outside of the
folder, contain links that lead there, claim wrong sizes, or unpack to more than the disk holds. So
only plain files and folders with relative paths are accepted, and their number, depth and sizes are
bounded while they are read. The extraction of `tarfile` is not used: this module creates each file
itself, in a folder that no other user can enter.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from automesh import limits
from automesh.errors import UsageError
from automesh.reading import open_regular
from automesh.texts.terminal import is_unicode
from automesh.units import format_bytes

LEFT_OUT = ("__pycache__", "node_modules", "results", "automesh-service")
"""Folders that are not packed, in addition to those whose names begin with a dot."""
RULES = "mesh_rules.toml"
"""The rule file is not packed: a search writes it, which would otherwise change the hash of the
bundle."""
_SHOWN_CHARS = 200
_GZIP = b"\x1f\x8b"
_FOLDER_MODE, _FILE_MODE, _PROGRAM_MODE = 0o700, 0o600, 0o700


class BadBundle(UsageError):
    """The file is no tar, or contains something that a bundle may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The description of a bundle.

    Attributes:
      digest: the name of the bundle: SHA-256 of its bytes, in hexadecimal digits.
      packed_bytes: its size as it is sent.
      files: relative paths of its files, sorted.
    """

    digest: str
    packed_bytes: int
    files: tuple[str, ...]


def pack(folder: Path, *, without: Path | None = None) -> tuple[bytes, Bundle]:
    """Packs a folder: the same files give the same bytes, independent of the user and the time.

    Links and everything that is neither a file nor a folder are left out, and so are folders whose
    names begin with a dot or are in `LEFT_OUT`, and rules.

    Args:
      without: a file that is left out as well.

    Raises:
      UsageError: the folder holds more than a bundle may, or cannot be read.
    """
    buffer = io.BytesIO()
    names: list[str] = []
    left = limits.BUNDLE_BYTES
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _files_in(folder):
            if path.name == RULES or (without is not None and path.resolve() == without.resolve()):
                continue
            name = path.relative_to(folder).as_posix()
            check_name(name)
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                left -= status.st_size + 2 * tarfile.BLOCKSIZE
                if left < 0 or len(names) >= limits.BUNDLE_MEMBERS:
                    raise UsageError(
                        f"the folder `{folder}` holds more than a bundle may: {_bounds()}",
                        hint="submit from a folder that holds the script and what it imports alone",
                    )
                member = tarfile.TarInfo(name)
                member.size = status.st_size
                member.mode = _PROGRAM_MODE if status.st_mode & 0o100 else _FILE_MODE
                tar.addfile(member, file)
            names.append(name)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return data, Bundle(digest=digest, packed_bytes=len(data), files=tuple(names))


def _bounds() -> str:
    return f"{format_bytes(limits.BUNDLE_BYTES)} in {limits.BUNDLE_MEMBERS} files"


def _files_in(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda one: one.name)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"the folder `{folder}` cannot be read: {reason}") from None
    for path in entries:
        if path.is_symlink() or path.name.startswith("."):
            continue
        if path.is_dir():
            if path.name not in LEFT_OUT:
                yield from _files_in(path)
        elif path.is_file():
            yield path


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path) -> Bundle:
    """Checks a bundle that a user sent, without unpacking it.

    Raises:
      BadBundle: it is no tar, or contains something that a bundle may not; names the member.
    """
    with _opened(path) as tar:
        files = tuple(sorted(member.name for member in _members(tar) if member.isreg()))
    return Bundle(digest=digest_of(path), packed_bytes=path.stat().st_size, files=files)


def members_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Returns the names of the members, and whether each is a file and not a folder; raises as
    `check`."""
    with _opened(path) as tar:
        return tuple((member.name, member.isreg()) for member in _members(tar))


def unpack(path: Path, folder: Path) -> None:
    """Unpacks a bundle into a folder, which is made and must not exist.

    Raises:
      BadBundle: as for `check`; nothing is left behind.
      OSError: the disk or the permissions do not allow it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".draft", dir=folder.parent))
    try:
        with _opened(path) as tar:
            for member in _members(tar):
                _make(tar, member, draft / member.name)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _make(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    """Makes one folder or file; fails if the path already exists."""
    if member.isdir():
        place.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        return
    place.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    mode = _PROGRAM_MODE if member.mode & 0o100 else _FILE_MODE
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    content = tar.extractfile(member)
    if content is None:
        raise BadBundle(f"`{member.name}` in the bundle is no file")
    with os.fdopen(os.open(place, flags, mode), "wb") as file:
        shutil.copyfileobj(content, file, 2**16)
        written = file.tell()
    if written != member.size:
        raise BadBundle(f"`{member.name}` in the bundle is cut short")


@contextmanager
def _opened(path: Path) -> Generator[tarfile.TarFile]:
    """Opens a plain or a gzipped tar; raises `BadBundle` for any error in it."""
    with open_regular(path) as file, _plain(file) as plain:
        # `tarfile` calls no other methods of the file that it reads from.
        careful: Any = _Careful(plain)
        try:
            with tarfile.open(fileobj=careful, mode="r:") as tar:
                yield tar
        except BadBundle:
            raise
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            raise BadBundle(f"the bundle is no tar that can be read: {error}") from None


@contextmanager
def _plain(file: BinaryIO) -> Generator[IO[bytes]]:
    """Opens the plain tar: a gzipped one is first unpacked into a file without a name, up to the
    bound."""
    if file.read(2) != _GZIP:
        file.seek(0)
        yield file
        return
    file.seek(0)
    left = limits.BUNDLE_UNPACKED_BYTES
    with tempfile.TemporaryFile() as whole:
        try:
            with gzip.GzipFile(fileobj=file) as packed:
                while chunk := packed.read(limits.CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        raise BadBundle(_too_large())
                    whole.write(chunk)
        except (OSError, EOFError, zlib.error) as error:
            raise BadBundle(f"the bundle is no gzip file that can be read: {error}") from None
        whole.seek(0)
        yield whole


def _too_large() -> str:
    return f"the bundle unpacks to more than {format_bytes(limits.BUNDLE_UNPACKED_BYTES)}"


class _Careful:
    """A file that allows only small reads, since `tarfile` would read a header of any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > limits.BUNDLE_HEADER_BYTES:
            raise BadBundle("a header of the bundle is larger than any that is needed")
        return self._file.read(size)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members; each is checked before the next one is read.

    Raises:
      BadBundle: names the member.
    """
    left = limits.BUNDLE_UNPACKED_BYTES
    files, folders = set[str](), set[str]()
    number = 0
    while (member := tar.next()) is not None:
        number += 1
        if number > limits.BUNDLE_MEMBERS:
            raise BadBundle(f"the bundle has more than {limits.BUNDLE_MEMBERS} members")
        if not (member.isdir() or member.isreg()) or member.issparse():
            raise BadBundle(
                f"`{shown(member.name)}` in the bundle is {_kind(member)}, and only files and "
                "folders are taken"
            )
        member.name = check_name(member.name)
        left -= member.size if member.isreg() else 0
        if member.size < 0 or left < 0:
            raise BadBundle(_too_large())
        above = {str(one) for one in PurePosixPath(member.name).parents} - {"."}
        if member.name in files or above & files or (member.isreg() and member.name in folders):
            raise BadBundle(f"`{shown(member.name)}` is twice in the bundle")
        folders |= above
        (files if member.isreg() else folders).add(member.name)
        yield member


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    if member.isfifo():
        return "a pipe"
    if member.isdev():
        return "a device"
    return "a sparse file" if member.issparse() else "something else"


def shown(name: str) -> str:
    """Returns a name as it is shown in a sentence: on one line, and cut if it is long."""
    found = name if name.isprintable() else ascii(name)[1:-1]
    return found if len(found) <= _SHOWN_CHARS else f"{found[:_SHOWN_CHARS]}..."


def check_name(name: str) -> str:
    """Returns the name of a member without needless parts.

    Raises:
      BadBundle: the name could lead out of the folder, or no file can have it.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise BadBundle(f"`{shown(name)}` in the bundle leads out of its folder")
    is_bad = "\0" in name or "\\" in name or not is_unicode(name) or not name.isprintable()
    if is_bad or any(len(part.encode()) > 255 for part in parts):
        raise BadBundle(f"`{shown(name)}` in the bundle is no name of a file")
    if len(name) > limits.BUNDLE_PATH_CHARS or len(parts) > limits.BUNDLE_DEPTH:
        raise BadBundle(f"`{shown(name[:40])}...` in the bundle is too long or too deep for a path")
    return "/".join(parts)
