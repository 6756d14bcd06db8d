"""The stream between a search and an agent: gRPC carries it, sealed JSON is in it.

The search serves one method, a stream in both directions, which an agent calls when it comes and
that lasts until the search ends. The first messages are a handshake, in plain JSON:

    agent   {"hello": nonce}
    search  {"nonce": nonce, "proof": ...}     the search knows the token
    agent   {"proof": ..., "facts": sealed}    so does the agent
    search  sealed {"welcome": number}, or {"refused": why}

Whoever knows the token may also ask what the hosts do (`launch.asking`), in the place of the third:

    guest   {"asks": proof}
    search  sealed {"hosts": [...], "wanted": number}, and the end

Who comes to no channel, because of its certificate, says so and nothing else, unsealed:

    stranger    {"turns_away": why}                see `launch.certificates`

All that follows is sealed, and long messages come in pieces (`launch.secret`). Whoever has nothing
to say says `{"beat": true}` every few seconds: who is silent for longer is stopped, lost, or behind
a network that is.

What a process says and what its agent says of it are told apart: `{"from": name, "message": ...}`
and `{"from": name, "ended": ...}`. The former is the script's, and may be anything.
"""

from __future__ import annotations

import re
from typing import Any

from automesh.errors import UsageError
from automesh.launch.secret import PIECE_BYTES
from automesh.worker.wire import Message, decode_json

SERVICE, METHOD = "automesh.Fleet", "Serve"
BEAT_S = 2.0
LOST_S = 20.0
"""An agent or a search that has said nothing for so long counts as lost (docs/clusters.md)."""
HANDSHAKE_S = 15.0
_LARGEST_BYTES = PIECE_BYTES + 2**10  # Of one piece with its seal; see `automesh.launch.secret`.
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,60}\])(?::(?P<port>[0-9]{1,5}))?"
)
_HIGHEST_PORT = 65535
OPTIONS = (
    ("grpc.max_receive_message_length", _LARGEST_BYTES),
    ("grpc.max_send_message_length", _LARGEST_BYTES),
    # No keepalive of gRPC's own: beats tell who is lost, and a server that thinks pings come too
    # often hangs up on everybody.
    ("grpc.keepalive_time_ms", 2**31 - 1),
    # A proxy between the hosts of a cluster would only be in the way, and would see everything.
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
)


def plain(data: Any) -> Message:
    """A message of the handshake; empty if it is none."""
    return (decode_json(data) if isinstance(data, bytes) else None) or {}


def check_address(text: str, *, port_needed: bool) -> tuple[str, int]:
    """Reads `10.0.0.1:8600`, `host-a:8600` or `[::1]:8600`.

    Args:
      port_needed: False if the port may be left out, which gives 0: any that is free.

    Raises:
      UsageError: it is none.
    """
    found = _ADDRESS.fullmatch(text)
    port = (found["port"] or "") if found else ""
    if found is None or (port_needed and not port) or int(port or 0) > _HIGHEST_PORT:
        raise UsageError(
            f"`{text}` is not an address",
            hint="write `10.0.0.1:8600`, `host-a:8600` or `[fd00::1]:8600`",
        )
    return found["host"], int(port or 0)
