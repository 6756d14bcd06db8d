"""Reads files that another process, another person or another machine may have written.

A file is read only if it is a regular one, and only up to a limit (`automesh.limits`): a named pipe
would block for ever, and a device or a growing file would never end. Whatever the bytes are, the
functions return a value or raise an `AutomeshError` of one sentence.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from automesh import limits
from automesh.errors import UsageError
from automesh.texts.terminal import is_unicode
from automesh.units import format_bytes

_BOM = b"\xef\xbb\xbf"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# `a.b.c` with more parts than may nest: tomllib's time grows with the square of their number.
_PART = r"""(?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:{_PART}[ \t]*+\.[ \t]*+){{{limits.NESTING}}}")
_TOO_DEEP = f"nested more than {limits.NESTING} deep"
_LEAST = -limits.LARGEST_INTEGER - 1
_TOO_LARGE = "a whole number of more than 64 bits"


class Unreadable(UsageError):
    """A file that does not exist, is no regular file, may not be read, or is too large."""


class Malformed(UsageError):
    """A text that is not TOML or JSON, or holds values that automesh does not accept in files."""


class OutOfBounds(Malformed):
    """A text that is nested deeper, or holds a larger number, than automesh accepts in files."""


# Files


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Opens a regular file to read its bytes.

    Args:
      follow: links; False where somebody else may have put one.

    Raises:
      Unreadable: it does not exist, is no regular file, or may not be read.
    """
    # Does not block if the file has been replaced by a named pipe since it was checked.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        # Checked first, since opening a device can already have an effect.
        _check_kind(path, path.stat().st_mode)
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Checks that a path does not exist, or is a regular file.

    Raises:
      Unreadable: it is something else, or the system does not tell.
    """
    try:
        _check_kind(path, path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_bytes(path: Path, *, limit_bytes: int) -> bytes:
    """Reads all bytes of a regular file.

    Raises:
      Unreadable: as `open_regular`, or it holds more than `limit_bytes`.
    """
    chunks: list[bytes] = []
    left = limit_bytes
    try:
        with open_regular(path) as file:
            while chunk := file.read(limits.CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:  # Counted while reading: a file may grow, or state a size of 0.
                    raise Unreadable(
                        f"`{path}` cannot be read: it holds more than {format_bytes(limit_bytes)}"
                    )
                chunks.append(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    return b"".join(chunks)


def read_text(path: Path, *, limit_bytes: int = limits.PEOPLE_FILE_BYTES) -> str:
    """Reads a UTF-8 file as text, with line ends unchanged and without a byte order mark.

    Raises:
      Unreadable: as `read_bytes`, or it is not UTF-8.
    """
    return decoded(read_bytes(path, limit_bytes=limit_bytes), path)


def decoded(data: bytes, path: Path) -> str:
    """Decodes the bytes of a file as `read_text` does.

    Raises:
      Unreadable: it is not UTF-8; names `path`.
    """
    mark = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"`{path}` is not UTF-8 text (byte {mark + error.start} is "
            f"{error.object[error.start]:#04x})"
        ) from None


def kind_of_file(path: Path) -> str:
    """Says what is at a path other than a regular file: `a folder`, `a named pipe`; else empty."""
    try:
        return _kind(path.stat().st_mode)
    except (OSError, ValueError):
        return ""


def _kind(mode: int) -> str:
    return next((words for is_it, words in _KINDS if is_it(mode)), "")


def _check_kind(path: Path, mode: int) -> None:
    if kind := _kind(mode):
        raise Unreadable(f"`{path}` cannot be read: it is {kind}, not a file")


def _unreadable(path: Path, error: Exception) -> Unreadable:
    if isinstance(error, Unreadable):
        return error
    reason = "no file can have this name"
    if isinstance(error, OSError):
        reason = (error.strerror or type(error).__name__).lower()
    return Unreadable(f"`{path}` cannot be read: {reason}")


# Texts that people write


def parse_toml(text: str) -> dict[str, Any]:
    """Parses a TOML text.

    Raises:
      Malformed: a syntax error, with its line; or half of a surrogate pair.
      OutOfBounds: nested too deep, or a number out of all bounds.
    """
    if _LONG_KEY.search(text):
        raise OutOfBounds(_TOO_DEEP)
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise OutOfBounds(_TOO_DEEP) from None
    except ValueError as error:
        raise _malformed(error) from None
    check_values(tree)
    return tree


def parse_json(text: str) -> Any:
    """Parses a JSON text.

    Raises:
      Malformed: as `parse_toml`.
    """
    try:
        tree = json.loads(text)
    except RecursionError:
        raise OutOfBounds(_TOO_DEEP) from None
    except ValueError as error:
        raise _malformed(error) from None
    check_values(tree)
    return tree


def _malformed(error: ValueError) -> Malformed:
    if isinstance(error, tomllib.TOMLDecodeError | json.JSONDecodeError):
        reason = str(error)
        return Malformed(f"{reason[:1].lower()}{reason[1:]}")
    return OutOfBounds(_TOO_LARGE)  # more digits than Python reads


def check_values(tree: Any) -> None:
    """Refuses values that parsers accept but that later code cannot handle.

    Raises:
      Malformed: half of a surrogate pair.
      OutOfBounds: nested too deep, or a whole number of more than 64 bits.
    """
    level: list[Any] = [tree]
    for _ in range(limits.NESTING + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                below += value
            elif isinstance(value, list | tuple | set):
                below += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, int) and not _LEAST <= value <= limits.LARGEST_INTEGER:
                raise OutOfBounds(_TOO_LARGE)
        if not below:
            return
        level = below
    raise OutOfBounds(_TOO_DEEP)


def _check_text(text: str) -> None:
    if not is_unicode(text):
        raise Malformed("a text with half of a character (`\\ud800` to `\\udfff`)")
