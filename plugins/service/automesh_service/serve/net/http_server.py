"""uvicorn as the service uses it: with bounds for connections, heads, answers and the log."""

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
    """uvicorn's server, which ends streams of events when it is told to end."""

    service: OpenService

    def handle_exit(self, sig: int, frame: object) -> None:
        self.service.closing.set()
        super().handle_exit(sig, frame)  # pyright: ignore[reportArgumentType]


def make_server(
    service: OpenService, context: ssl.SSLContext | None = None, *, graceful_s: int = 5
) -> EventServer:
    """The server of an open service.

    Args:
      context: what connections are encrypted with; None for no TLS.
      graceful_s: for requests that are at work when it is told to end.
    """
    protocol: Any = partial(TimedProtocol, connections=service.connections)
    config = uvicorn.Config(
        make_app(service),
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level=logging.WARNING,
        access_log=False,  # Addresses of pages have tickets in them.
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=graceful_s,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        # How many there may be is counted where they come in.
        limit_concurrency=None,
        backlog=BACKLOG,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    server = EventServer(config)
    server.service = service
    return server


def run_server(server: EventServer, sockets: Sequence[socket.socket]) -> None:
    """Serves at sockets that listen until the server is told to end; closes them."""
    doors: list[socket.socket] = []
    try:
        doors += [Door(one, server.service.connections) for one in sockets]
        # uvicorn repeats the signal that has ended it, for those who started it in a program.
        with bounded_log(), suppress(KeyboardInterrupt):
            server.run(sockets=doors)
    finally:
        for one in doors:
            one.close()
