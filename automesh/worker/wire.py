"""Messages between parent and worker: JSON objects, each behind its length in four bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
LONGEST_BYTES = 64 * 2**20  # Far above any message: a longer length can only be garbage.
_CHUNK_BYTES = 2**16
# Bound before any user code runs, which may replace `json.dumps` or `os.write`.
_encode, _decode = json.JSONEncoder().encode, json.JSONDecoder().decode
_read, _write, _fstat, _close = os.read, os.write, os.fstat, os.close
_PRIVATE_FD = 200  # Above what scripts use by habit, below the smallest customary limit of 256.


class WireError(Exception):
    """The other side is gone, or what came over the channel is not a message."""


def encode(message: Message) -> bytes:
    """Packs one message."""
    body = _encode(message).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes, in whatever pieces it comes, into messages; gives no torn one."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next bytes and gives the messages that they complete.

        Raises:
          WireError: the bytes are not what `encode` writes.
        """
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LONGEST_BYTES:
                raise WireError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_message(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def decode_json(body: bytes) -> Message | None:
    """The JSON object in some bytes; None if they are something else."""
    try:
        message = _decode(body.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _message(body: bytes) -> Message:
    message = decode_json(body)
    if message is None:
        raise WireError(f"not a JSON object: {body[:80]!r}")
    return message


class ParentEnd:
    """The parent's end of a channel: never blocks, so no worker that hangs can stop the parent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.ended = False
        self._connection = connection
        self._decoder = Decoder()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while `flush` has something left to do."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much as the channel takes now and keeps the rest for `flush`."""
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Sends more of what is unsent; drops it if the worker is gone, which the leash reports."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Gives all messages that are there; sets `ended` at the end of the channel.

        Raises:
          WireError: the worker sent something else than messages.
        """
        messages: list[Message] = []
        try:
            while data := self._connection.recv(_CHUNK_BYTES):
                messages += self._decoder.feed(data)
        except BlockingIOError:
            return messages
        except ConnectionError:
            pass
        self.ended = True
        return messages

    def close(self) -> None:
        self._connection.close()


class ChildEnd:
    """The worker's end: blocking, on a descriptor that user code does not meet by accident."""

    def __init__(self, fd: int) -> None:
        self._descriptor = PrivateDescriptor(fd)
        os.close(fd)
        self._decoder = Decoder()
        self._received: list[Message] = []
        # A copy of the worker that user code forks must not answer in its place.
        os.register_at_fork(after_in_child=self._descriptor.close)

    def send(self, message: Message) -> None:
        """Sends one message whole.

        Raises:
          WireError: the parent is gone, or user code closed the descriptor.
        """
        try:
            self._descriptor.write(encode(message))
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> Message | None:
        """Waits for the next message; None when the parent closed the channel.

        Raises:
          WireError: the parent sent something else, or user code closed the descriptor.
        """
        while not self._received:
            try:
                data = self._descriptor.read()
            except ConnectionError:
                return None
            except OSError as error:
                raise WireError(str(error)) from error
            if not data:
                return None
            self._received = self._decoder.feed(data)
        return self._received.pop(0)


class PrivateDescriptor:
    """A copy of a descriptor, under a high number, that no program started from here inherits."""

    def __init__(self, fd: int) -> None:
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FD)
        self._identity = self._look()

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bytes:
        """Waits for some bytes; none at the end of the stream.

        Raises:
          OSError: also if user code closed the descriptor.
        """
        self._check()
        return _read(self._fd, _CHUNK_BYTES)

    def write(self, data: bytes) -> None:
        """Writes all of `data`.

        Raises:
          OSError: also if user code closed the descriptor.
        """
        self._check()
        view = memoryview(data)
        while view:
            view = view[_write(self._fd, view) :]

    def close(self) -> None:
        """Closes it, unless it is closed already."""
        with contextlib.suppress(OSError):
            self._check()
            _close(self._fd)
        self._fd = -1

    def _check(self) -> None:
        # User code may close all descriptors and open a file of its own under our number.
        if self._look() != self._identity:
            raise OSError(errno.EBADF, "user code closed a descriptor of the worker")

    def _look(self) -> tuple[int, int]:
        status = _fstat(self._fd)
        return status.st_dev, status.st_ino
