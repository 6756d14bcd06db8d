"""Reads what another process, another person or another machine may have written.

A file is read only if it is a regular one, and only up to a bound of its own (`automesh.limits`):
a named pipe would wait for ever, a device or a growing file never end. Whatever the bytes are, the
functions give a value or raise an `AutomeshError` of one sentence.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.units import format_bytes

_BOM = b"\xef\xbb\xbf"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a named pipe, not a file"),
    (stat.S_ISSOCK, "is a socket, not a file"),
    (stat.S_ISCHR, "is a device, not a file"),
    (stat.S_ISBLK, "is a device, not a file"),
)
# `a.b.c` with more parts than may nest: tomllib's time grows with the square of their number.
_PART = r"""(?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:{_PART}[ \t]*+\.[ \t]*+){{{limits.NESTING}}}")
_TOO_DEEP = f"nested more than {limits.NESTING} deep"


class Unreadable(UsageError):
    """A file that is not there, is no regular file, may not be read, or is too large."""


class Malformed(UsageError):
    """A text that is not TOML or JSON, or that holds what no file of ours needs."""


# Files


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read its bytes; follows links.

    Raises:
      Unreadable: it is not there, is something else than a file, or may not be read.
    """
    try:
        # Asked first: to open a device may already do something.
        _check_kind(path, path.stat().st_mode)
        # Never waits, should it have become a named pipe since.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Makes sure that a name is free, or that of a regular file.

    Raises:
      Unreadable: there is something else, or it may not be asked about.
    """
    try:
        _check_kind(path, path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_bytes(path: Path, *, limit_bytes: int) -> bytes:
    """All bytes of a regular file.

    Raises:
      Unreadable: as `open_regular`, or it holds more than `limit_bytes`.
    """
    chunks: list[bytes] = []
    left = limit_bytes
    try:
        with open_regular(path) as file:
            while chunk := file.read(limits.CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:  # Counted while reading: a file may grow, or say that it is empty.
                    raise Unreadable(
                        f"`{path}` cannot be read: it holds more than {format_bytes(limit_bytes)}"
                    )
                chunks.append(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    return b"".join(chunks)


def read_text(path: Path, *, limit_bytes: int = limits.PEOPLE_FILE_BYTES) -> str:
    """The text of a file in UTF-8, line ends as they are; a byte order mark is no part of it.

    Raises:
      Unreadable: as `read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path, limit_bytes=limit_bytes)
    mark = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"`{path}` is not UTF-8 text (byte {mark + error.start} is "
            f"{error.object[error.start]:#04x})"
        ) from None


def real_path(path: Path) -> Path:
    """The path behind all links.

    Raises:
      Unreadable: the links lead in a circle, or may not be followed.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle, until 3.12.
        raise _unreadable(path, error) from None


def _check_kind(path: Path, mode: int) -> None:
    for is_kind, what in _KINDS:
        if is_kind(mode):
            raise Unreadable(f"`{path}` cannot be read: {what}")


def _unreadable(path: Path, error: Exception) -> Unreadable:
    if isinstance(error, Unreadable):
        return error
    reason = "the name is not one that a file can have"
    if isinstance(error, RuntimeError):
        reason = "too many levels of symbolic links"
    if isinstance(error, OSError):
        reason = (error.strerror or type(error).__name__).lower()
    return Unreadable(f"`{path}` cannot be read: {reason}")


# Texts that people write


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
      Malformed: a syntax error, with its line; nested too deep; or a number out of all bounds.
    """
    if _LONG_KEY.search(text):
        raise Malformed(_TOO_DEEP)
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except ValueError as error:
        raise _malformed(error) from None
    _check_values(tree)
    return tree


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
      Malformed: as `parse_toml`.
    """
    try:
        tree = json.loads(text)
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except ValueError as error:
        raise _malformed(error) from None
    _check_values(tree)
    return tree


def _malformed(error: ValueError) -> Malformed:
    if isinstance(error, tomllib.TOMLDecodeError | json.JSONDecodeError):
        reason = str(error)
        return Malformed(f"{reason[:1].lower()}{reason[1:]}")
    return Malformed(f"a whole number of more than {limits.INTEGER_BITS} bits")


def _check_values(tree: Any) -> None:
    """Refuses values that parsers take and that nothing behind them can deal with."""
    level: list[Any] = [tree]
    for _ in range(limits.NESTING + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                below += value
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, int) and value.bit_length() > limits.INTEGER_BITS:
                raise Malformed(f"a whole number of more than {limits.INTEGER_BITS} bits")
        if not below:
            return
        level = below
    raise Malformed(_TOO_DEEP)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed("a text with half of a character (`\\ud800` to `\\udfff`)") from None


# What is left out


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records that were left out because they are damaged: one must not block the others.

    Attributes:
      named: what each is, in a few words, with what is wrong with it.
    """

    named: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, what: str, error: BaseException) -> None:
        """Remembers a record once.

        Args:
          what: the record, such as `trial 7 of measure`.
          error: why it cannot be read.
        """
        self.named.setdefault(what, reason_of(error))

    def notices(self) -> tuple[str, ...]:
        """A sentence for each of the first few, and one for the others."""
        said = [
            f"{what} is damaged and left out: {reason}"
            for what, reason in list(self.named.items())[: limits.NAMED_DAMAGES]
        ]
        more = len(self.named) - len(said)
        if more:
            is_one = more == 1
            said.append(f"{more} more {'record is' if is_one else 'records are'} damaged as well")
        return tuple(said)


def reason_of(error: BaseException) -> str:
    """An error as part of a sentence: one line, and a short one."""
    said = error.message if isinstance(error, AutomeshError) else str(error)
    text = " ".join(said.split())
    if not isinstance(error, AutomeshError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _SAID_CHARS else f"{text[: _SAID_CHARS - 3]}..."


_SAID_CHARS = 200
