"""Live progress: what is sent, and how a stream goes on where it was."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from automesh_service.remote.client import Event, read_events
from automesh_service.serve import events
from automesh_service.serve.events import Watched, stream, view_of
from automesh_service.submissions.store import Submission
from automesh_service.submissions.tokens import Holder
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import Running

NAME = "train-gpu-h100-16-0123abcd"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr(events, "_QUIET_S", 0.05)


def read(running: Running, path: str, token: str = "admin", last: str = "") -> list[Event]:
    reply = running.ask("GET", path, token=token, Last_Event_ID=last)
    assert reply.headers["content-type"].startswith("text/event-stream")
    return list(read_events(io.BytesIO(reply.body)))


def test_a_study_that_has_ended(running: Running) -> None:
    path = f"/v1/studies/{NAME}/events"
    state, end = read(running, path, "read")
    assert (state.kind, end.kind) == ("state", "end")
    assert json.loads(state.data)["studies"][0]["state"] == "ended"
    # Who has it already gets nothing twice.
    assert [one.kind for one in read(running, path, "read", end.number)] == ["end"]
    for wrong in ("x", "0-0", "99999999999999999999-0123456789ab", "-1-000000000000"):
        assert [one.kind for one in read(running, path, "read", wrong)] == ["state", "end"]


def test_a_submission_with_its_log(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    number = submit(running, digest).json()["number"]
    running.service.store.end(number, "failed", "as an example")
    job = running.service.home.job(number)
    job.mkdir()
    log = job / "search.log"
    log.write_text("first\n\x1b[31msecond\nhalf a li")
    path = f"/v1/submissions/{number}/events"
    state, lines, end = read(running, path, "submit")
    assert json.loads(state.data)["submission"]["said"] == "as an example"
    assert json.loads(lines.data)["text"] == "first\nsecond\n"
    with log.open("a") as more:
        more.write("ne\n")
    # From where the connection broke: the rest of the log alone.
    rest = read(running, path, "submit", lines.number)
    assert [one.kind for one in rest] == ["log", "end"]
    assert json.loads(rest[0].data)["text"] == "half a line\n"
    assert [one.kind for one in read(running, path, "submit", rest[-1].number)] == ["end"]
    assert end.number.split("-")[1] == state.number.split("-")[1]
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert "log" not in {one.kind for one in read(running, path, "submit")}
    log.unlink()
    for make in (log.mkdir, lambda: os.mkfifo(log)):
        make()
        assert [one.kind for one in read(running, path, "submit")] == ["state", "end"]
        assert running.ask("GET", f"/v1/submissions/{number}/log", token="submit").status == 404
        log.rmdir() if log.is_dir() else log.unlink()


def test_changes_are_sent_while_one_watches(running: Running, tmp_path: Path) -> None:
    """The stream itself, without a network: what it looks at changes between two events."""
    log = tmp_path / "search.log"
    known = running.service.catalogue.get(NAME)
    assert known is not None
    digest = running.send_bundle(BUNDLE)
    number = submit(running, digest).json()["number"]
    store = running.service.store
    holder = running.service.tokens.check(running.tokens["admin"])
    assert isinstance(holder, Holder)
    seen: list[Submission] = []

    def look() -> Watched:
        seen.append(store.get(number, None))
        return Watched(submission=seen[-1], studies=(known,))

    async def watch() -> list[Any]:
        kinds: list[Any] = []
        view = view_of(running.service, holder, "what changes", look)
        async for data in stream(running.service, view, log, ""):
            text = data.decode()
            if "event: state" in text:
                kinds.append(seen[-1].state)
                if seen[-1].state == "queued":
                    log.write_text("it begins\n")
                elif seen[-1].state == "running":
                    store.end(number, "found", "a rule was found")
            elif "event: log" in text:
                kinds.append("log")
                while (next_one := store.start_next()) and next_one.number != number:
                    store.end(next_one.number, "cancelled", "not this one")
            elif "event: end" in text:
                kinds.append("end")
        return kinds

    assert asyncio.run(watch()) == ["queued", "log", "running", "found", "end"]


def test_a_stream_ends_with_the_token_of_its_reader(running: Running) -> None:
    running.tokens["leaving"] = running.service.tokens.make("eve", "admin", None)
    number = submit(running, running.send_bundle(BUNDLE)).json()["number"]
    path = f"/v1/submissions/{number}/events"
    found: list[list[Event]] = []
    reader = threading.Thread(target=lambda: found.append(read(running, path, "leaving")))
    reader.start()
    end_s = time.monotonic() + 300
    while not running.service.watchers.count:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    running.service.tokens.revoke(running.tokens["leaving"].split("_")[1])
    reader.join(20)
    assert not reader.is_alive()
    assert "end" not in {one.kind for one in found[0]}  # It has not ended: this reader has.
    running.service.store.cancel(number, None)


def test_events_are_read_as_the_standard_has_them() -> None:
    text = b": comment\nretry: 10\n\nid: 7\nevent: log\ndata: a\ndata:b\n\ndata: c\r\n\r\ndata: cut"
    assert list(read_events(io.BytesIO(text))) == [
        Event(kind="log", data="a\nb", number="7"),
        Event(kind="message", data="c", number="7"),
    ]
