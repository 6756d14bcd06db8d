"""Standard streams of a command that never raise: unwritable output is dropped.

Progress, notes and errors go to stderr, the result to stdout, and either may be on a full disk,
closed, or a pipe whose reader has gone. A search that ended for that would lose hours because of
one line. So both streams accept everything: output that the system refuses is dropped, and the
first error is kept, so that the command can say at its end that its result was not written.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STUCK_S = 1.0
"""Seconds to wait for a full non-blocking descriptor, whose reader may be busy."""


class _Sink(io.RawIOBase):
    """A descriptor to which everything can be written.

    Args:
      name: Python's name of the stream, `<stderr>`.
      is_closed: the program was started without it.

      Attributes:
        failure: why something was not written; None if everything was.
    """

    def __init__(self, fd: int, name: str, *, is_closed: bool) -> None:
        super().__init__()
        self.name = name
        self.mode = "wb"
        self.failure: OSError | None = None
        self._fd = fd
        self._is_closed = is_closed

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        try:
            while left:
                left = left[self._written(left) :]
        except OSError as error:
            self.failure = self.failure or error
        return size

    def _written(self, data: memoryview) -> int:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            if not select.select([], [self._fd], [], _STUCK_S)[1]:
                raise
            return os.write(self._fd, data)


def open_streams(*, errors: str) -> None:
    """Replaces stdout and stderr by streams that accept everything.

    Streams that are not those of the process, as in a test or a notebook, stay. Missing descriptors
    are opened: otherwise a database could get their numbers, and printing would damage it.

    Args:
      errors: handler for characters that the terminal's encoding lacks; see
        `codecs.register_error`.
    """
    missing = _open_missing()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or (type(stream) is io.TextIOWrapper and stream.fileno() == fd):
            setattr(sys, name, _replacement(stream, fd, name, errors, is_closed=fd in missing))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def unwritten(stream: TextIO) -> OSError | None:
    """Flushes a stream and says why output was not written; None if all was."""
    try:
        stream.flush()
    except OSError as error:  # Not one of our streams.
        return error
    buffer = getattr(stream, "buffer", None)
    sink = getattr(buffer, "raw", buffer)
    return sink.failure if isinstance(sink, _Sink) else None


def taking_all(stream: TextIO) -> TextIO:
    """Wraps a stream so that everything can be written to it.

    It is for messages in another program, whose own streams stay as they are.
    """
    return cast(TextIO, _Tolerant(stream))


class _Tolerant:
    """A stream that drops output which the wrapped one refuses."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _open_missing() -> set[int]:
    missing: set[int] = set()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            missing.add(fd)
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    return missing


def _replacement(
    stream: TextIO | None, fd: int, name: str, errors: str, *, is_closed: bool
) -> io.TextIOWrapper:
    sink = _Sink(fd, f"<{name}>", is_closed=is_closed or stream is None)
    if not isinstance(stream, io.TextIOWrapper):
        # As Python makes it: a reader of stderr sees each line at once.
        return io.TextIOWrapper(
            io.BufferedWriter(sink), encoding="utf-8", errors=errors, line_buffering=fd == 2
        )
    stream.flush()
    return io.TextIOWrapper(
        sink if stream.write_through else io.BufferedWriter(sink),  # pyright: ignore[reportArgumentType]
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
