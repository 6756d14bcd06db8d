"""uvicorn's protocol, which also closes slow connections."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from automesh import limits
from automesh_service.serve.net.connections import Connections, OpenConnection

_LATE = b"the head of the request arrives too slowly\n"
_TOO_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
) % (len(_LATE), _LATE)


class TimedProtocol(H11Protocol):
    """Closes a connection that has no active request and has sent none for `HEAD_S`, or whose
    answer the client does not read for `ANSWER_STALL_S`. Reports active requests to `connections`.

    uvicorn bounds how long a connection may be idle after an answer, but not how long a head takes
    to arrive, nor how long an answer takes to leave: a thousand connections that send a byte a
    minute, or read nothing, would use up all descriptors.
    """

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _held: OpenConnection | None = None

    def __init__(self, *args: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._connections = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._held = self._connections.of(self.client)
        if self._held is None:  # It was closed for another connection meanwhile.
            transport.abort()
            return
        self._held.is_begun = True
        self._held.close = transport.abort
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_work()
        if self._is_at_work():
            self._stop_waiting()
        # The next head has begun to arrive: more of its data does not extend its time.
        elif self._deadline is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_work()  # The next request may have arrived together with the former one.

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stalling()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stalling()
        self._stall = self.loop.call_later(limits.ANSWER_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalling()

    def _is_at_work(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _note_work(self) -> None:
        if self._held is not None:
            self._held.is_at_work = self._is_at_work()

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(limits.HEAD_S, self._on_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_stalling(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_late(self) -> None:
        self._deadline = None
        if self._is_at_work() or self.transport.is_closing():
            return
        # No answer if nothing was sent: browsers open connections that they do not use at once.
        if self.conn.trailing_data[0]:
            self.transport.write(_TOO_LATE)
        self.transport.close()
