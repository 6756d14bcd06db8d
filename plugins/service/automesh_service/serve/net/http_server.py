"""uvicorn with the settings of the service: bounds for connections, heads, answers and the log."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from automesh_service.serve.app import make_app
from automesh_service.serve.net.addresses import BACKLOG
from automesh_service.serve.net.door import Door
from automesh_service.serve.net.log_rate import bounded_log
from automesh_service.serve.net.protocol import TimedProtocol
from automesh_service.serve.service import OpenService

_HEAD_BYTES = 32 * 2**10


class EventServer(uvicorn.Server):
    """uvicorn's server, which also ends streams of events when it is asked to end."""

    service: OpenService

    def handle_exit(self, sig: int, frame: object) -> None:
        self.service.closing.set()
        super().handle_exit(sig, frame)  # pyright: ignore[reportArgumentType]


def make_server(
    service: OpenService, context: ssl.SSLContext | None = None, *, graceful_s: int = 5
) -> EventServer:
    """Makes the server of an open service.

    Args:
      context: the TLS context of the connections; None for no TLS.
      graceful_s: seconds for active requests when the server is asked to end.
    """
    protocol: Any = partial(TimedProtocol, connections=service.connections)
    config = uvicorn.Config(
        make_app(service),
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level=logging.WARNING,
        access_log=False,  # The URLs of pages contain tickets.
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=graceful_s,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        # `Door` counts and bounds the connections.
        limit_concurrency=None,
        backlog=BACKLOG,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    server = EventServer(config)
    server.service = service
    return server


def run_server(server: EventServer, sockets: Sequence[socket.socket]) -> None:
    """Serves at listening sockets until the server is asked to end; then closes them."""
    doors: list[socket.socket] = []
    try:
        doors += [Door(one, server.service.connections) for one in sockets]
        # uvicorn repeats the signal that ended it, for programs that embed it.
        with bounded_log(), suppress(KeyboardInterrupt):
            server.run(sockets=doors)
    finally:
        for one in doors:
            one.close()
