"""The messages between a server and the process that reads its studies: JSON, over sockets.

Nothing is pickled, because the users who write studies decide what is in these texts.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.jsonio import read_json, to_text
from automesh.units import format_bytes
from automesh.worker.wire import LONGEST_BYTES, Decoder, WireError, encode
from automesh_service.serve.reading.summary import KnownStudy, StudySummary

Message = dict[str, Any]
_CHUNK_BYTES = 2**18


class LaneEnded(Exception):
    """The other side has closed the socket."""


class TooLong(UsageError):
    """The message is longer than the other side accepts; it would close the socket."""


class Lane:
    """One end of a socket; one thread at a time may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = Decoder()
        self._received: deque[Message] = deque()

    def send(self, message: Message, limit_s: float | None = None) -> None:
        """Sends a whole message.

        Raises:
          TooLong: nothing of it was sent.
          LaneEnded: the other side is gone.
          TimeoutError: it has not taken the message within `limit_s`.
        """
        data = packed(message)
        self._socket.settimeout(limit_s)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise LaneEnded(str(error)) from None

    def receive(self, limit_s: float | None = None) -> Message:
        """Waits for the next message.

        Raises:
          LaneEnded: the other side is gone, or sends something that is no message.
          TimeoutError: nothing has come within `limit_s`.
        """
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while not self._received:
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            try:
                data = self._socket.recv(_CHUNK_BYTES)
                self._received += self._decoder.feed(data)
            except TimeoutError:
                raise
            except (OSError, WireError) as error:
                raise LaneEnded(str(error)) from None
            if not data:
                raise LaneEnded("it has ended")
        return self._received.popleft()

    def close(self) -> None:
        self._socket.close()


def packed(message: Message) -> bytes:
    """Returns a message as bytes.

    Raises:
      TooLong: it is longer than the other side accepts.
    """
    data = encode(message)
    if len(data) > LONGEST_BYTES:
        raise TooLong(
            f"a message about the study has {format_bytes(len(data))}, more than the "
            f"{format_bytes(LONGEST_BYTES)} that one can have",
            hint="a study that is so large is read by `automesh show` alone",
        )
    return data


def unread(name: str, *, folder: Path, storage: str, changed_s: float) -> KnownStudy:
    """Returns a study that was listed and not read yet."""
    summary = StudySummary(name=name, changed_s=changed_s)
    missing = "the study was not read yet"
    return known_of(summary, folder=folder, storage=storage, missing=missing)


def known_of(
    summary: StudySummary,
    *,
    folder: Path,
    storage: str,
    rule: str = "",
    missing: str = "",
    stamp: str = "",
) -> KnownStudy:
    """Returns a study together with the texts that lists are made of."""
    words = (summary.name, summary.workload, summary.target, summary.device)
    words += (summary.plan, summary.state)
    return KnownStudy(
        summary=summary,
        folder=folder,
        storage=storage,
        rule=rule,
        missing=missing,
        stamp=stamp,
        words=" ".join(words).lower(),
        text=to_text(summary, StudySummary),
    )


def to_message(known: KnownStudy) -> Message:
    """Turns a study into a message, without its storage, which is the same for all studies that
    have one."""
    return {
        "name": known.summary.name,
        "folder": str(known.folder),
        "is_stored": bool(known.storage),
        "rule": known.rule,
        "missing": known.missing,
        "stamp": known.stamp,
        "words": known.words,
        "text": known.text,
    }


def from_message(said: Message, storage: str) -> KnownStudy:
    """Reads a study from a message that `to_message` has made.

    Raises:
      AutomeshError: its summary has values that no summary may have.
    """
    summary: StudySummary = read_json(said["text"], StudySummary)
    return KnownStudy(
        # In the text, characters that some programs cannot read are replaced; the name must be
        # exactly that of the folder.
        summary=replace(summary, name=said["name"]),
        folder=Path(said["folder"]),
        storage=storage if said["is_stored"] else "",
        rule=said["rule"],
        missing=said["missing"],
        stamp=said["stamp"],
        words=said["words"],
        text=said["text"],
    )
