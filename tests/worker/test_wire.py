"""The framing of messages: whatever pieces they arrive in, and whatever is torn off."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.worker.wire import ChildEnd, Decoder, ParentEnd, WireError, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5)


@settings(deadline=None, max_examples=50)
@given(messages=MESSAGES, data=st.data())
def test_messages_survive_any_fragmentation(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(encode(message) for message in messages)
    decoder, got = Decoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += decoder.feed(stream[:size])
        stream = stream[size:]
    assert got == messages


@settings(deadline=None, max_examples=50)
@given(messages=MESSAGES.filter(bool), data=st.data())
def test_a_torn_last_message_is_not_given(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    last = encode(messages[-1])
    whole = b"".join(encode(message) for message in messages[:-1])
    torn = last[: data.draw(st.integers(0, len(last) - 1))]
    assert Decoder().feed(whole + torn) == messages[:-1]


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"Hello, world", b"\0\0\0\x02[]", b"\0\0\0\x02{x", b"\0\0\0\x01\xff"],
)
def test_garbage_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(data)


def test_the_parent_never_blocks_on_a_child_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        end = ParentEnd(ours)
        big = {"text": "x" * 2**22}
        end.send(big)
        assert end.has_unsent
        decoder, got = Decoder(), []
        while not got:
            got = decoder.feed(theirs.recv(2**20))
            end.flush()
        assert got == [big]
        assert not end.has_unsent
        end.send(big)
        theirs.close()
        end.flush()
        assert not end.has_unsent
        end.close()


def test_the_child_notices_that_its_descriptor_became_another_file() -> None:
    ours, theirs = socket.socketpair()
    before = _descriptors()
    child = ChildEnd(theirs.detach())
    child.send({"a": 1})
    (fd,) = _descriptors() - before
    assert fd >= 200
    assert not os.get_inheritable(fd)
    other = os.open("/dev/null", os.O_RDWR)
    os.dup2(other, fd)
    os.close(other)
    with pytest.raises(WireError):
        child.send({"b": 2})
    os.close(fd)
    with pytest.raises(WireError):
        child.receive()
    assert ParentEnd(ours).receive() == [{"a": 1}]
    ours.close()


def _descriptors() -> set[int]:
    numbers = {int(fd.name) for fd in Path("/dev/fd").iterdir()}
    return {fd for fd in numbers if Path(f"/dev/fd/{fd}").exists()}
