"""Messages between a server and the process that reads studies: whole ones, or none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from automesh.worker.wire import Decoder, encode
from automesh_service.serve.reading import lanes, messages
from automesh_service.serve.reading.messages import (
    Lane,
    LaneEnded,
    TooLong,
    from_message,
    known_of,
    to_message,
    unread,
)
from automesh_service.serve.reading.summary import StudySummary

Ends = tuple[Lane, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, theirs = socket.socketpair()
    lane = Lane(mine)
    yield lane, theirs
    lane.close()
    theirs.close()


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    lane, other = ends
    data = encode({"begun": "one"}) + encode({"is_behind": False})
    other.sendall(data[:10])
    with pytest.raises(TimeoutError):
        lane.receive(0.01)
    other.sendall(data[10:])
    assert lane.receive(10.0) == {"begun": "one"}
    assert lane.receive() == {"is_behind": False}
    lane.send({"what": "table"}, 10.0)
    assert Decoder().feed(other.recv(4096)) == [{"what": "table"}]


@pytest.mark.parametrize("last", [b"", encode({"a": 1})[:-1], b"\xff\xff\xff\xff", b"\0\0\0\1["])
def test_an_end_in_the_middle_is_an_end(ends: Ends, last: bytes) -> None:
    lane, other = ends
    other.sendall(last)
    other.close()
    with pytest.raises(LaneEnded):
        lane.receive(10.0)
    with pytest.raises(LaneEnded):
        lane.send({"what": "table" * 10**6}, 10.0)


def test_who_takes_nothing_is_not_waited_for(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send({"what": "x" * 10**7}, 0.01)


def test_what_is_too_long_is_refused_and_the_conversation_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side takes a longer one for garbage, and hangs up."""
    monkeypatch.setattr(messages, "LONGEST_BYTES", 100)
    lane, other = ends
    with pytest.raises(TooLong, match="more than the 100 B"):
        lane.send({"text": "x" * 100})
    lane.send({"text": "x"})
    assert Decoder().feed(other.recv(4096)) == [{"text": "x"}]


def test_an_answer_that_is_too_long_is_a_refusal(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "answer_of", lambda asked: "x" * asked["width"])  # pyright: ignore
    monkeypatch.setattr(messages, "LONGEST_BYTES", 500)
    lane, other = ends

    def work() -> None:
        with suppress(LaneEnded):
            lanes.work("", Lane(other))

    thread = threading.Thread(target=work)
    thread.start()
    for width, has_text in ((10, True), (1000, False), (20, True)):
        lane.send({"question": {"width": width}}, 10.0)
        said = lane.receive(60.0)
        assert ("text" in said, "refused" in said) == (has_text, not has_text)
    other.shutdown(socket.SHUT_RDWR)
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["train-cpu-2", "\udc80 no text", "<b>"])
def test_a_study_is_the_same_on_the_other_side(name: str, ends: Ends) -> None:
    lane, other = ends
    summary = StudySummary(name=name, state="ended", plan="tp:2", step_s=float("inf"), legal=3)
    folder = Path("results") / name
    known = known_of(summary, folder=folder, storage="x.db", rule="schema = 1", stamp="1")
    other.sendall(encode({"study": to_message(known)}))
    assert from_message(lane.receive(10.0)["study"], "x.db") == known
    assert known.words.startswith(name.lower())
    fresh = unread(name, folder=folder, storage="", changed_s=2.0)
    assert from_message(to_message(fresh), "x.db") == fresh
    assert (fresh.stamp, fresh.summary.state, fresh.rule) == ("", "unread", "")
