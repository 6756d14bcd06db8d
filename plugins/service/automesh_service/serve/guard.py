"""The guard around the routes: every request and every answer passes through it.

It refuses requests for another host or from another origin before it reads anything of them. It
counts and times bodies while they arrive. It adds headers to answers that forbid browsers to run or
embed them. It records changes and refusals in the audit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders

from automesh import limits
from automesh_service.serve import access
from automesh_service.serve.problems import Problem, answer, not_written
from automesh_service.serve.service import OpenService
from automesh_service.submissions.database import Unwritable

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_LOG = logging.getLogger("automesh.serve")
_ONCE = ("host", "authorization", "origin", "content-length", "transfer-encoding")
"""Headers that must not occur twice: a proxy and this server might each use a different one."""
_READING = ("GET", "HEAD", "OPTIONS")
_AUDITED = (400, 401, 403, 405, 408, 413, 421, 422, 429)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    # The policy of an answer that is no page: a browser runs nothing in it, whatever type it
    # guesses.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
}


def body_limit(method: str, path: str) -> int:
    """Returns how many bytes the body of a request may have."""
    if method == "PUT" and path.startswith(("/v1/bundles/", "/v1/agent/leases/")):
        return limits.BUNDLE_BYTES
    return limits.PEOPLE_FILE_BYTES if path.endswith("/diff") else limits.REQUEST_BYTES


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App, service: OpenService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        began_s = time.monotonic()
        status, is_lost = 500, False

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(scope, message)
            await send(message)

        async def sending(message: Message) -> None:
            nonlocal status, is_lost
            if is_lost:
                return
            if message["type"] == "http.response.start":
                status = int(message["status"])
                # The audit comes first: no answer confirms a change that the audit does not have.
                try:
                    await self._audit(request, status)
                except Unwritable as error:
                    status, is_lost = 503, True
                    await not_written(request, error)(scope, receive, answering)
                    return
            await answering(message)

        try:
            refused = self._refused(request)
            if refused is not None:
                response = answer(request, refused.status_code, str(refused.detail), refused.hint)
                response.headers["Connection"] = "close"
                await response(scope, receive, sending)
            else:
                await self._app(scope, self._careful(request, receive), sending)
        except Exception:
            if status == 500:
                # The error is in the server's log; the client gets no details.
                said = "the server could not do this"
                response: Response = answer(request, 500, said)
                await response(scope, receive, sending)
            raise
        finally:
            self._count(scope, request.method, status, time.monotonic() - began_s)

    def _refused(self, request: Request) -> Problem | None:
        """Returns why a request is refused before its body is read; None if it may go on."""
        names = self._service.settings.names
        headers = request.headers
        if headers.get("host", "").lower() not in names:
            return Problem(
                421,
                "this service is not known under that name",
                hint="start it with --hostname NAME to let it be reached under another one",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] not in names:
            return Problem(403, "requests from pages of other sites are not taken")
        path = str(request.scope.get("path", ""))
        if ".." in path.split("/") or "\\" in path or "\0" in path:
            return Problem(400, "that is no path of this service")
        said_twice = next((one for one in _ONCE if len(headers.getlist(one)) > 1), None)
        if said_twice:
            return Problem(400, f"the header `{said_twice}` is there more than once")
        if "transfer-encoding" in headers and (
            "content-length" in headers or request.scope.get("http_version") == "1.0"
        ):
            # A proxy that uses the other header would take a part of the body for a second request.
            return Problem(400, "a body has a `Content-Length` or a `Transfer-Encoding`, not both")
        length = headers.get("content-length", "0")
        if length.isdecimal() and len(length) < 20:
            most = body_limit(request.method, path)
            if int(length) > most:
                return Problem(413, f"the body is larger than {most} bytes")
            return None
        return Problem(400, "the length of the body is no number")

    def _careful(self, request: Request, receive: Receive) -> Receive:
        """Receives the body of a request with a valid token, within the bounds of size and time."""
        most = body_limit(request.method, request.url.path)
        began_s, got, is_whole = time.monotonic(), 0, False
        is_known = request.method in _READING

        async def receiving() -> Message:
            nonlocal got, is_whole, is_known
            if is_whole:
                return await receive()
            if not is_known:
                # The body of an order is read before the route checks the token, so the token is
                # checked here.
                await to_thread.run_sync(access.check_known, request, self._service)
                is_known = True
            try:
                message = await asyncio.wait_for(receive(), limits.BODY_S)
            except TimeoutError:
                raise _too_slow() from None
            got += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if got > most:
                raise Problem(
                    413, f"the body is larger than {most} bytes", headers={"Connection": "close"}
                )
            took_s = time.monotonic() - began_s
            if not is_whole and took_s > max(limits.BODY_S, got / limits.BODY_LEAST_BYTES_PER_S):
                raise _too_slow()
            return message

        return receiving

    def _add_headers(self, scope: MutableMapping[str, Any], message: Message) -> None:
        headers = MutableHeaders(raw=message.setdefault("headers", []))
        for name, value in _HEADERS.items():
            headers.setdefault(name, value)
        if scope["scheme"] == "https":
            headers.setdefault("Strict-Transport-Security", "max-age=31536000")

    async def _audit(self, request: Request, status: int) -> None:
        """Records changes and refusals in the audit."""
        state = request.scope.get("state", {})
        asks_for_change = request.method not in _READING
        is_change = asks_for_change and status < 400
        is_routine = is_change and state.get("is_routine")
        if is_routine or not (asks_for_change or status in _AUDITED):
            return
        service = self._service
        address = request.client.host if request.client else ""
        # Refusals are limited for each address. Changes are always recorded, because behind a proxy
        # all clients have one address.
        if not is_change and not service.limiter.take_note(state.get("who") or address):
            return
        note = partial(
            service.audit.note,
            f"{request.method} {request.url.path}",
            who=state.get("who", ""),
            address=address,
            subject=state.get("subject", ""),
            status=status,
            said=state.get("said", ""),
        )
        try:
            await to_thread.run_sync(note)
        except Unwritable:
            if is_change:
                raise
            # The client still gets the refusal.
            _LOG.warning("a refusal could not be noted in the audit")

    def _count(
        self, scope: MutableMapping[str, Any], method: str, status: int, seconds: float
    ) -> None:
        # The label is the route and not the path: each name of a study would make a new time
        # series.
        route = str(getattr(scope.get("route"), "path", "other"))
        known = method if method in (*_READING, "POST", "PUT", "DELETE") else "other"
        self._service.metrics.requests.labels(route, known, str(status)).inc()
        if not route.endswith("/events"):
            self._service.metrics.seconds.labels(route).observe(seconds)


def _too_slow() -> Problem:
    return Problem(408, "the body arrives too slowly", headers={"Connection": "close"})
