"""What a search and its agents know each other by: the token, and the seal of their messages.

Whoever may send orders to an agent runs code on its host, and whoever may answer for one forges
figures. So both sides prove that they know the token before anything else is said (each by a hash
over fresh random numbers of both, so that the token itself never travels and no answer can be
replayed), and every message is sealed by a key of this one conversation and its number in it.
Without certificates the messages can be read on the way, but neither changed, nor added, nor left
out in between.

A long message is cut into pieces: so a stranger, who can send one piece before it is found out that
it knows no token, cannot fill the memory, and whoever sends much is heard all the while.
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
"""Of a message in all its pieces: above what a worker may say at once (`automesh.worker.wire`)."""
_MORE, _LAST = b"+", b"."


def new_token() -> str:
    """A token for one search."""
    return secrets.token_hex(32)


def read_token(environ: Mapping[str, str]) -> str:
    """The token that the environment holds, or the file that it names.

    A token is never an argument of a command: others on the machine can read those.

    Raises:
      UsageError: there is none, it is too short to be safe, or others may read the file.
    """
    if not (token := environ.get(TOKEN, "").strip()):
        if not (name := environ.get(TOKEN_FILE, "")):
            raise UsageError("no token is set, and nothing is served without one", hint=_HINT)
        token = _token_of(Path(name))
    if len(token) < _LEAST_CHARS:
        raise UsageError(
            f"the token has {len(token)} characters, and could be guessed; {_LEAST_CHARS} are the "
            "least",
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
    """A random number for one conversation."""
    return secrets.token_hex(32)


def proof(token: str, side: str, agent_nonce: str, search_nonce: str) -> str:
    """What only a side that knows the token can say in this conversation.

    Args:
      side: `search` or `agent`: what the one has said is no proof of the other.
    """
    said = f"automesh {side} {agent_nonce} {search_nonce}".encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Whether a proof is right; takes as long for every wrong one."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


class BrokenSeal(Exception):
    """A message was changed, added or left out on its way."""


class Seal:
    """The messages of one conversation in one direction.

    Args:
      side: who speaks: `search` or `agent`.
    """

    def __init__(self, token: str, side: str, agent_nonce: str, search_nonce: str) -> None:
        self._key = proof(token, f"{side} speaks", agent_nonce, search_nonce).encode()
        self._number = 0
        self._begun = bytearray()

    def close(self, message: Message) -> Iterator[bytes]:
        """Seals the next message, in as many pieces as it needs; all of them have to be sent."""
        body = dumps(message).encode()
        for start in range(0, len(body), PIECE_BYTES):
            mark = _MORE if start + PIECE_BYTES < len(body) else _LAST
            piece = mark + body[start : start + PIECE_BYTES]
            yield self._mac(piece) + piece

    def open(self, data: bytes) -> Message | None:
        """Reads the next piece.

        Returns:
          The message that ends with it; None if more of it is to come.

        Raises:
          BrokenSeal: it is not what the other side has sent next.
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
            raise BrokenSeal("a message is no JSON object")
        return message

    def read(self, pieces: Iterator[bytes]) -> Message:
        """Reads a whole message from a stream.

        Raises:
          BrokenSeal: as `open`, or the stream ends within it.
        """
        while (message := self.open(next(pieces, b""))) is None:
            pass
        return message

    def _mac(self, piece: bytes) -> bytes:
        mac = hmac.new(self._key, _COUNT.pack(self._number) + piece, hashlib.sha256).digest()
        self._number += 1
        return mac
