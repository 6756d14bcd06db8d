"""HTTP/1.1 as uvicorn speaks it, with an end for requests whose head never comes.

uvicorn times how long a connection is idle after an answer, but not how long a head takes to
arrive: a thousand connections that send a byte a minute would keep all there are.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from automesh import limits


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request is at work and none has come for `HEAD_S`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_at_work():
            self._stop_waiting()
        elif self._deadline is None:  # The next head has begun: what it has is not made longer.
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_at_work(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(limits.HEAD_S, self._on_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_late(self) -> None:
        self._deadline = None
        if not self._is_at_work() and not self.transport.is_closing():
            self.transport.close()
