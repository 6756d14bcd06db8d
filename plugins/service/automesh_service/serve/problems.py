"""The answers to refused requests: a status, a sentence and a hint, in the format of RFC 9457."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from automesh.errors import AutomeshError
from automesh.jsonio import dumps
from automesh.texts.storage_url import masked
from automesh.texts.terminal import clean, shortened
from automesh_service.serve.limiter import TooManyWatchers
from automesh_service.serve.pages import Busy
from automesh_service.serve.reading.reader import Away, ReadingFailed
from automesh_service.submissions.database import Unwritable
from automesh_service.submissions.leases import Replayed
from automesh_service.submissions.store import Conflict, Missing, TooMany

_CHARS = 500
_SOON_S, _LATER_S = 5, 60
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
_LOG = logging.getLogger("automesh.serve")
_STATUS: tuple[tuple[type[AutomeshError], int], ...] = (
    (Replayed, 412),
    (Conflict, 409),
    (Missing, 404),
    (TooMany, 429),
    (Busy, 503),
    (Away, 503),
    (Unwritable, 503),
    (AutomeshError, 422),
)


class Problem(HTTPException):
    """The refusal of a request.

    Args:
      detail: one sentence: what was wrong.
      hint: what to do about it.
    """

    def __init__(
        self, status: int, detail: str, *, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail, headers)
        self.hint = hint


def answer(
    request: Request,
    status: int,
    detail: str,
    hint: str = "",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the answer to a refused request; its sentence is kept for the audit."""
    said = shortened(clean(masked(detail)), _CHARS)
    request.scope.setdefault("state", {})["said"] = said
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    content |= {"detail": said, **({"hint": clean(masked(hint))} if hint else {})}
    return Response(
        dumps(content),
        status_code=status,
        media_type="application/problem+json",
        headers=dict(headers or {}),
    )


def not_written(request: Request, error: Unwritable) -> Response:
    """Returns the answer to a request for which the disk has no room, and logs a warning for the
    operator of the service."""
    _LOG.warning("%s", error.message)
    after = {"Retry-After": str(_LATER_S)}
    return answer(request, 503, error.message, error.hint, after)


def handle_problems(app: FastAPI) -> None:
    """Makes the application turn every exception into an answer without a traceback."""

    def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        hint = error.hint if isinstance(error, Problem) else ""
        return answer(request, error.status_code, str(error.detail), hint, error.headers)

    def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, AutomeshError)
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        after_s = _SOON_S if isinstance(error, Away) else _LATER_S
        headers = {"Retry-After": str(after_s)} if status in (429, 503) else None
        return answer(request, status, error.message, error.hint, headers)

    def on_unwritable(request: Request, error: Exception) -> Response:
        assert isinstance(error, Unwritable)
        return not_written(request, error)

    def on_system(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        if error.errno not in _OF_DISK:
            raise error
        # Without the path of the file, which is no business of the client.
        return not_written(request, Unwritable((error.strerror or "").lower()))

    def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(request, 422, f"`{where}`: {first['msg']}")

    def on_watchers(request: Request, error: Exception) -> Response:
        del error
        return answer(
            request, 429, "too many streams of events are open", headers={"Retry-After": "30"}
        )

    def on_unread(request: Request, error: Exception) -> Response:
        del error
        return answer(request, 500, "the study could not be read: the log of the service says why")

    app.add_exception_handler(ReadingFailed, on_unread)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(AutomeshError, on_ours)
    app.add_exception_handler(Unwritable, on_unwritable)
    app.add_exception_handler(OSError, on_system)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(TooManyWatchers, on_watchers)


RESPONSES = {
    status: {"description": said, "content": {"application/problem+json": {}}}
    for status, said in (
        (401, "No valid token."),
        (403, "The token does not allow it, or the request comes from another origin."),
        (404, "There is none, or it is somebody else's."),
        (429, "Too many requests; `Retry-After` says when to come again."),
        (503, "It cannot be done or told just now; `Retry-After` says when to come again."),
    )
}
"""The answers that every route may give, for OpenAPI."""
