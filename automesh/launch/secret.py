"""The token by which a search and its agents recognise each other, and the seal of their messages.

Whoever can send orders to an agent can run code on its host, and whoever can answer for one can
forge figures. So both sides first prove that they know the token, each by a hash over fresh random
numbers of both: the token itself is never sent, and no answer can be replayed. Every message then
has a seal, made with a key of this one conversation and the number of the message. Without
certificates others on the network can read the messages, but cannot change, add or drop one
unnoticed.

A long message is sent in pieces. So a stranger, who can send one piece before its proof is checked,
cannot fill the memory; and a side that sends much still counts as alive.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.reading import Unreadable, open_regular
from automesh.worker.environment import TOKEN, TOKEN_FILE
from automesh.worker.wire import Message, decode_json

_LEAST_CHARS = 16
_MOST_BYTES = 4096
_HINT = (
    "make one with `openssl rand -hex 32`, the same for the search and all agents: in "
    f"{TOKEN}, or in a file of mode 0600 that {TOKEN_FILE} names"
)
_COUNT = struct.Struct(">Q")
_DIGEST_BYTES = 32
PIECE_BYTES = 2**20
LARGEST_BYTES = 80 * 2**20
"""Size limit of a message, all pieces together; more than a worker's longest message
(`automesh.worker.wire`)."""
_MORE, _LAST = b"+", b"."


def new_token() -> str:
    """Makes a random token for one search."""
    return secrets.token_hex(32)


def read_token(environ: Mapping[str, str]) -> str:
    """Reads the token from the environment, or from the file that the environment names.

    A token is never an argument of a command, since other users can read those.

    Raises:
      UsageError: there is none, it is too short to be safe, or others may read the file.
    """
    if not (token := environ.get(TOKEN, "").strip()):
        if not (name := environ.get(TOKEN_FILE, "")):
            raise UsageError("no token is set, and a search needs one", hint=_HINT)
        token = _token_of(Path(name))
    if len(token) < _LEAST_CHARS:
        raise UsageError(
            f"the token has {len(token)} characters and could be guessed; it needs at least "
            f"{_LEAST_CHARS}",
            hint=_HINT,
        )
    return token


def _token_of(path: Path) -> str:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"others may read the token in `{path}`", hint=f"run `chmod 600 {path}`"
                )
            return file.read(_MOST_BYTES).decode(errors="replace").strip()
    except (OSError, Unreadable) as error:
        raise UsageError(f"the token cannot be read: {error}", hint=_HINT) from None


def new_nonce() -> str:
    """Makes a random number for one conversation."""
    return secrets.token_hex(32)


def proof(token: str, side: str, agent_nonce: str, search_nonce: str) -> str:
    """Returns the proof that a side of this conversation knows the token.

    Args:
      side: `search` or `agent`, so that one side cannot repeat the other's proof.
    """
    said = f"automesh {side} {agent_nonce} {search_nonce}".encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Whether a proof is right, compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


class BrokenSeal(Exception):
    """A message was changed, added or dropped on its way."""


class Seal:
    """Seals or opens the messages of one conversation in one direction.

    Args:
      side: the sender: `search` or `agent`.
    """

    def __init__(self, token: str, side: str, agent_nonce: str, search_nonce: str) -> None:
        self._key = proof(token, f"{side} speaks", agent_nonce, search_nonce).encode()
        self._number = 0
        self._begun = bytearray()

    def close(self, message: Message) -> Iterator[bytes]:
        """Seals the next message as one or more pieces, all of which must be sent."""
        body = dumps(message).encode()
        for start in range(0, len(body), PIECE_BYTES):
            mark = _MORE if start + PIECE_BYTES < len(body) else _LAST
            piece = mark + body[start : start + PIECE_BYTES]
            yield self._mac(piece) + piece

    def open(self, data: bytes) -> Message | None:
        """Reads the next piece.

        Returns:
          The message if this was its last piece; None if more pieces follow.

        Raises:
          BrokenSeal: it is not the next piece that the other side sent.
        """
        mac, piece = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if not hmac.compare_digest(mac, self._mac(piece)):
            raise BrokenSeal("a message was changed on its way")
        self._begun += piece[1:]
        if len(self._begun) > LARGEST_BYTES:
            raise BrokenSeal(f"a message is longer than {LARGEST_BYTES} bytes")
        if piece[:1] == _MORE:
            return None
        body, self._begun = bytes(self._begun), bytearray()
        message = decode_json(body)
        if message is None:
            raise BrokenSeal("a message is not a JSON object")
        return message

    def read(self, pieces: Iterator[bytes]) -> Message:
        """Reads a whole message from a stream.

        Raises:
          BrokenSeal: as `open`, or the stream ends inside the message.
        """
        while (message := self.open(next(pieces, b""))) is None:
            pass
        return message

    def _mac(self, piece: bytes) -> bytes:
        mac = hmac.new(self._key, _COUNT.pack(self._number) + piece, hashlib.sha256).digest()
        self._number += 1
        return mac
