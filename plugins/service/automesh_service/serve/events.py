"""Live progress as server-sent events, resumable by `Last-Event-ID`.

The id of an event contains what its reader has: the number of bytes of the log, and a hash of the
last state that was sent. So a stream continues where it was after a broken connection or a killed
server, and the server stores nothing about its readers.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from automesh.jsonio import dumps, to_json
from automesh.reading import Unreadable, open_regular
from automesh.texts.terminal import clean_lines
from automesh_service.serve.looks import LookResult, View
from automesh_service.serve.reading.summary import KnownStudy, StudySummary
from automesh_service.serve.service import PAUSE_S, REFRESH_S, OpenService
from automesh_service.submissions.store import ENDED, Missing, Submission
from automesh_service.submissions.tokens import Holder

EVENTS = {200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}}
"""The description of a stream for OpenAPI."""
POLL_S = 0.5
_KEEPALIVE_S = 15.0
# seconds without a change after the end of a search, within which its last output is read
_QUIET_S = PAUSE_S + 2 * REFRESH_S
_CHUNK_BYTES = 2**14
_TAIL_BYTES = 2**16
_ID = re.compile(r"(?P<offset>\d{1,15})-(?P<state>[0-9a-f]{12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The present state of what one reader watches.

    Attributes:
      submission: None for a study without a submission.
      studies: the studies of the submission, or the one study.
    """

    submission: Submission | None
    studies: tuple[KnownStudy, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more unless somebody resumes the search."""
        if any(one.summary.state in ("running", "unread") for one in self.studies):
            return False
        return self.submission is None or self.submission.state in ENDED

    def to_json(self) -> dict[str, Any]:
        return {
            "submission": None if self.submission is None else submission_json(self.submission),
            "studies": [to_json(one.summary, StudySummary) for one in self.studies],
        }


def submission_json(one: Submission) -> dict[str, Any]:
    """Returns a submission as JSON, as its owner sees it."""
    return to_json(one, Submission)


async def stream(
    service: OpenService, view: View, log: Path | None, last_id: str
) -> AsyncIterator[bytes]:
    """Yields the events `state`, `log` and `end`. The stream breaks off when the token of its
    reader ends, or when the submission or study is removed.

    Args:
      view: the submission or study, which is looked at again and again.
      log: the file whose lines are sent; None for a reader who may not see them.
      last_id: the id of the last event that the reader has; empty for none.
    """
    found = _ID.fullmatch(last_id)
    offset = int(found["offset"]) if found else _beginning(log)
    sent = found["state"] if found else "0" * 12
    yield format_sse_event(retry=1000, comment="automesh")
    last_s = spoken_s = time.monotonic()
    while not service.closing.is_set():
        now_s = time.monotonic()
        seen = await view.look(POLL_S)
        if seen is None:
            return
        lines = _lines_after(log, offset)
        if seen.sign != sent:
            sent, last_s = seen.sign, now_s
            yield format_sse_event(event="state", data_str=seen.text, id=f"{offset}-{sent}")
        if lines:
            offset += len(lines)
            said = dumps({"text": clean_lines(lines.decode(errors="replace"))})
            yield format_sse_event(event="log", data_str=said, id=f"{offset}-{sent}")
        if lines or not seen.is_over:
            last_s = now_s
        if now_s - last_s > _QUIET_S:
            yield format_sse_event(event="end", data_str="{}", id=f"{offset}-{sent}")
            return
        if now_s - spoken_s > _KEEPALIVE_S:
            yield format_sse_event(comment="still here")
            spoken_s = now_s
        await asyncio.sleep(0.0 if len(lines) >= _CHUNK_BYTES else POLL_S)


def view_of(
    service: OpenService, holder: Holder, subject: str, look: Callable[[], Watched]
) -> View:
    """Returns a view for readers that have the same token and watch the same thing: they share it.

    Args:
      subject: a key for what is watched, the same for all of them.
      look: reads it, in a thread.
    """
    return service.looks.view((holder.number, subject), partial(_seen, service, holder, look))


def _seen(service: OpenService, holder: Holder, look: Callable[[], Watched]) -> LookResult | None:
    """Returns the state of what is watched; None if this reader may not see it any more, or if it
    is gone."""
    if service.tokens.holder(holder.number) is None:
        return None
    try:
        watched = look()
    except Missing:
        return None
    text = dumps(watched.to_json())
    sign = hashlib.sha256(text.encode()).hexdigest()[:12]
    # If the list of studies is old, it is not known that the search is over.
    is_over = watched.is_over and service.catalogue.is_fresh
    return LookResult(text=text, sign=sign, is_over=is_over)


def _beginning(log: Path | None) -> int:
    """Returns the offset at which a new reader begins: near the end of a long log."""
    return max(0, _size(log) - _TAIL_BYTES)


def _size(log: Path | None) -> int:
    try:
        return log.lstat().st_size if log is not None else 0
    except OSError:
        return 0


def _lines_after(log: Path | None, offset: int) -> bytes:
    """Returns whole lines of a log from `offset` on, as many as are sent at once."""
    if log is None or _size(log) <= offset:
        return b""
    try:
        # The submitted code could have replaced the log by a link or a device.
        with open_regular(log, follow=False) as file:
            file.seek(offset)
            data = file.read(_CHUNK_BYTES)
    except (OSError, Unreadable):
        return b""
    end = data.rfind(b"\n") + 1
    # A line that is longer than one chunk is sent in parts.
    return data[:end] if end or len(data) < _CHUNK_BYTES else data


class Watching(StreamingResponse):
    """A stream that calls back when it has ended, even if it never began."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        # A proxy must not buffer the events.
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def watching(service: OpenService, holder: Holder, events: AsyncIterator[bytes]) -> Watching:
    """Returns a response with a stream of events, which is counted while it is open.

    Raises:
      TooManyWatchers: too many streams are open.
    """
    service.watchers.enter(holder.number)

    async def counted() -> AsyncIterator[bytes]:
        service.metrics.watchers.inc()
        try:
            async for event in events:
                yield event
        finally:
            service.metrics.watchers.dec()

    return Watching(counted(), partial(service.watchers.leave, holder.number))
