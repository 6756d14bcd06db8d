"""The stream of messages between a search and an agent: sealed JSON over gRPC.

The search serves one method, a stream in both directions. An agent calls it when it starts, and the
stream lasts until the search ends. The first messages are a handshake, in plain JSON:

    agent   {"hello": nonce}
    search  {"nonce": nonce, "proof": ...}     the search knows the token
    agent   {"proof": ..., "facts": sealed}    so does the agent
    search  sealed {"welcome": number}, or {"refused": why}

A client with the token may also ask what the hosts do (`launch.asking`); it sends this third
message instead:

    guest   {"asks": proof}
    search  sealed {"hosts": [...], "wanted": number}, and the end

An agent that gets no encrypted channel, because of a certificate, sends only this, unsealed:

    stranger    {"turns_away": why}                see `launch.certificates`

All later messages are sealed, and long ones are sent in pieces (`launch.secret`). A side that has
nothing else to send sends `{"beat": true}` every few seconds: if it is silent for longer, it or the
network has failed.

`{"from": name, "message": ...}` passes on a message of a process, whose content the user's script
may have made. `{"from": name, "ended": ...}` is the agent's own report that the process has ended.
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
"""After this many seconds without a message an agent or a search counts as lost
(docs/clusters.md)."""
HANDSHAKE_S = 15.0
_LARGEST_BYTES = PIECE_BYTES + 2**10  # One piece with its seal; see `automesh.launch.secret`.
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,60}\])(?::(?P<port>[0-9]{1,5}))?"
)
_HIGHEST_PORT = 65535
OPTIONS = (
    ("grpc.max_receive_message_length", _LARGEST_BYTES),
    ("grpc.max_send_message_length", _LARGEST_BYTES),
    # gRPC's own keepalive is off: beats show who is lost, and a server closes connections whose
    # pings seem too frequent.
    ("grpc.keepalive_time_ms", 2**31 - 1),
    # A proxy between the hosts of a cluster is of no use, and could read every message.
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
)


def plain(data: Any) -> Message:
    """Reads a message of the handshake; empty if the data is not one."""
    return (decode_json(data) if isinstance(data, bytes) else None) or {}


def check_address(text: str, *, port_needed: bool) -> tuple[str, int]:
    """Reads `10.0.0.1:8600`, `host-a:8600` or `[::1]:8600`.

    Args:
      port_needed: False if the port may be left out, which gives 0: any that is free.

    Raises:
      UsageError: the text is not an address.
    """
    found = _ADDRESS.fullmatch(text)
    port = (found["port"] or "") if found else ""
    if found is None or (port_needed and not port) or int(port or 0) > _HIGHEST_PORT:
        raise UsageError(
            f"`{text}` is not an address",
            hint="write `10.0.0.1:8600`, `host-a:8600` or `[fd00::1]:8600`",
        )
    return found["host"], int(port or 0)
