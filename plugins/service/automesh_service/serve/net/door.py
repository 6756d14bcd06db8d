"""The listening sockets of the service. They count each connection before anything is read from it.

The event loop accepts all waiting connections, and the protocol only gets them after the TLS
handshake. So they are counted here, where they are accepted and closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from automesh import limits
from automesh_service.serve.net.connections import Connections, OpenConnection

_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop: the connections that are closed for
them only end in the next turn."""
_REST_S = 0.02
"""Seconds to sleep while there is no free descriptor: the listening socket would wake the loop all
the time."""
_LATE_S, _ONCE_MORE_S = 0.1, 1.0
"""If the event loop reaches a deadline more than `_LATE_S` late, the client may be innocent: it
gets `_ONCE_MORE_S` more."""
_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG = logging.getLogger("automesh.serve")


class Accepted(socket.socket):
    """A connection that calls back when it is closed, whoever closes it."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


class Door(socket.socket):
    """A listening socket that counts the connections that it accepts."""

    def __init__(self, listening: socket.socket, connections: Connections) -> None:
        super().__init__(fileno=listening.detach())
        self._connections = connections
        self._taken = 0
        self._spare: int | None = None
        self._keep_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts the next connection; the event loop calls it.

        Raises:
          BlockingIOError: no connection is waiting, or others are served first.
        """
        loop = asyncio.get_running_loop()
        if self._taken == 0:
            loop.call_soon(self._begin_anew)
        if self._taken >= _AT_ONCE:
            raise BlockingIOError(errno.EAGAIN, "others are served first")
        self._taken += 1
        try:
            plain, address = super().accept()
        except OSError as error:
            if error.errno not in _OUT:
                raise
            self._turn_away(error)
            raise BlockingIOError(errno.EAGAIN, "there is no descriptor") from None
        taken = Accepted(fileno=plain.detach())
        held = self._connections.enter((str(address[0]), int(address[1])), _ender(taken))
        if held is None:
            taken.close()
            raise BlockingIOError(errno.EAGAIN, "there are too many connections")
        taken.on_close = lambda: self._connections.leave(held)
        _end_unbegun_in(limits.HEAD_S, held)
        return taken, address

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _begin_anew(self) -> None:
        self._taken = 0

    def _keep_spare(self) -> None:
        """Reserves a descriptor, so that a connection can be accepted and closed when no other is
        free."""
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _turn_away(self, error: OSError) -> None:
        """Closes the connection that has waited longest: otherwise the event loop would try to
        accept it again and again."""
        _LOG.warning("connections are turned away: %s", error.strerror)
        if self._spare is None:
            time.sleep(_REST_S)
        else:
            os.close(self._spare)
            self._spare = None
            with suppress(OSError):
                super().accept()[0].close()
        self._keep_spare()


def _ender(taken: socket.socket) -> Callable[[], None]:
    """Returns a function that ends a connection which no protocol has yet: its transport sees the
    end, and closes it."""

    def end() -> None:
        with suppress(OSError):
            taken.shutdown(socket.SHUT_RDWR)

    return end


def _end_unbegun_in(wait_s: float, held: OpenConnection) -> None:
    """Closes a connection whose handshake has not ended within `wait_s`.

    If the event loop reaches the deadline late, it was busy itself, and the client may not be the
    cause: then it handles the data that has arrived first, and the connection gets more time.
    """
    loop = asyncio.get_running_loop()
    due_s = loop.time() + wait_s

    def end() -> None:
        if held.is_begun:
            return
        if loop.time() - due_s > _LATE_S:
            _end_unbegun_in(_ONCE_MORE_S, held)
        else:
            held.close()

    loop.call_later(wait_s, end)
