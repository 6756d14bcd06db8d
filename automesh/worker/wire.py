"""Messages between parent and worker: JSON objects, each after its length in four bytes."""

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
LONGEST_BYTES = 64 * 2**20  # Far above any message: a larger length is garbage.
_CHUNK_BYTES = 2**16
# Bound before any user code runs, which may replace `json.dumps` or `os.write`.
_encode, _decode = json.JSONEncoder().encode, json.JSONDecoder().decode
_read, _write, _fstat, _close = os.read, os.write, os.fstat, os.close
_PRIVATE_FD = 200  # Above what scripts use, below the smallest usual limit, 256.


class WireError(Exception):
    """The other side has ended, or has sent something that is not a message."""


def encode(message: Message) -> bytes:
    """Encodes one message."""
    body = _encode(message).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Splits a stream of bytes, which arrives in any pieces, into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next bytes and returns the messages that they complete.

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
    """Reads a JSON object from bytes; None if they are something else."""
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
    """The parent's end of a channel, which never blocks, so that a worker that hangs cannot block
    the parent."""

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
        """Whether `flush` has something left to send."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much as the channel accepts now, and keeps the rest for `flush`."""
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Sends more of the unsent bytes; drops them if the worker has ended, which the leash
        reports."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Returns all messages that have arrived; sets `ended` at the end of the channel.

        Raises:
          WireError: the worker sent something other than messages.
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
    """The worker's end of a channel, which blocks, on a descriptor that user code does not use by
    accident."""

    def __init__(self, fd: int) -> None:
        self._descriptor = PrivateDescriptor(fd)
        os.close(fd)
        self._decoder = Decoder()
        self._received: list[Message] = []
        # A process that user code forks from the worker must not answer for it.
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
        """Waits for the next message; None if the parent closed the channel.

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
    """A copy of a descriptor under a high number, which programs started from here do not
    inherit."""

    def __init__(self, fd: int) -> None:
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FD)
        self._identity = self._look()

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bytes:
        """Waits for some bytes; returns none at the end of the stream.

        Raises:
          OSError: reading failed, or user code closed the descriptor.
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
        """Closes the descriptor if it is open."""
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
