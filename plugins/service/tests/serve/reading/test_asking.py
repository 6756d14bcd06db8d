"""Whose turn it is: questions that end the process that answers them, and those beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from automesh.errors import UsageError
from automesh_service.serve.reading import asking as askings
from automesh_service.serve.reading.asking import Asking
from automesh_service.serve.reading.reader import Away, ReaderEnded

WAIT_S = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows, in its only place."""
    now_s = [0.0]
    monkeypatch.setattr(askings, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def ending(kind: type[Away] = ReaderEnded, *, is_suspect: bool = True) -> Callable[[], str]:
    def ask() -> str:
        asked.append(kind)
        error = kind("it has ended")
        error.is_suspect = is_suspect
        raise error

    asked: list[object] = []
    ask.asked = asked  # pyright: ignore[reportFunctionMemberAccess]
    return ask


def times(ask: Callable[[], str]) -> int:
    return len(ask.asked)  # pyright: ignore


def test_a_study_that_ends_its_reader_is_not_asked_about_again_and_again(
    clock: list[float],
) -> None:
    asking, ask = Asking(), ending()
    with pytest.raises(ReaderEnded):
        asking.answer("a", ask)
    assert times(ask) == 2  # It may have been killed by somebody: it is asked once more.
    for count in (2, 3):
        for _ in range(3):
            with pytest.raises(Away, match=f"has ended {count} times in a row"):
                asking.answer("a", ask)
        assert times(ask) == count
        assert asking.answer("b", lambda: "other studies") == "other studies"
        clock[0] += askings.AGAIN_S * 2 ** (count - 2)
        with pytest.raises(ReaderEnded):
            asking.answer("a", ask)
        assert times(ask) == count + 1  # Not twice: it is known for it.
    clock[0] += askings.LONGEST_S
    assert asking.answer("a", lambda: "answered") == "answered"
    with pytest.raises(ReaderEnded):
        asking.answer("a", ask)
    assert times(ask) == 6  # As at first.


def test_who_asks_while_the_reader_is_ended_by_another_is_asked_again_without_blame() -> None:
    asking, ask = Asking(), ending(is_suspect=False)
    for count in (2, 4, 6):
        with pytest.raises(ReaderEnded):
            asking.answer("a", ask)
        assert times(ask) == count


def test_a_question_that_was_not_answered_in_time_is_not_asked_at_once_again() -> None:
    asking, ask = Asking(), ending(Away)
    for count in (1, 2):
        with pytest.raises(Away, match="it has ended"):
            asking.answer("a", ask)
        assert times(ask) == count
    with pytest.raises(Away, match="not asked about"):
        asking.answer("a", ask)
    asking.forget("a")  # as when it is gone, and there is another one of its name
    with pytest.raises(Away, match="it has ended"):
        asking.answer("a", ask)


def test_an_answer_or_a_refusal_is_none_that_ends_a_reader() -> None:
    asking, ask = Asking(), ending(Away)

    def refuse() -> str:
        raise UsageError("there is no rule")

    for _ in range(3):
        with pytest.raises(Away, match="it has ended"):
            asking.answer("a", ask)
        with pytest.raises(UsageError, match="no rule"):
            asking.answer("a", refuse)


class Held:
    """A question that is at work until it is let go."""

    def __init__(self, asking: Asking, name: str) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self.error: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=(asking, name))
        self._thread.start()

    def _run(self, asking: Asking, name: str) -> None:
        try:
            asking.answer(name, self._ask)
        except Exception as error:
            self.error.append(error)

    def _ask(self) -> str:
        self.begun.set()
        assert self._go.wait(WAIT_S)
        return "answered"

    def let_go(self) -> None:
        self._go.set()

    def end(self) -> None:
        self.let_go()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self.error == []


def test_one_study_leaves_lanes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking()
    first = Held(asking, "slow")
    assert first.begun.wait(WAIT_S)
    more = [Held(asking, "slow") for _ in range(3)]
    while asking._there["slow"] < 4:  # pyright: ignore[reportPrivateUsage]
        threading.Event().wait(0.001)
    assert not any(one.begun.is_set() for one in more)
    with pytest.raises(Away, match="too many"):
        asking.answer("slow", lambda: "one too many")
    assert asking.answer("quick", lambda: "answered") == "answered"
    for one in (first, *more):
        one.let_go()
    for one in (first, *more):
        one.end()
    monkeypatch.setattr(askings, "TURN_S", 0.01)
    first = Held(asking, "slow")
    assert first.begun.wait(WAIT_S)
    with pytest.raises(Away, match="not answered yet"):
        asking.answer("slow", lambda: "too late")
    first.end()


def test_of_those_that_may_be_to_blame_one_at_a_time_is_asked_about() -> None:
    """Else who has only been asked about beside a deadly one would be blamed with it."""
    asking = Asking()
    for name in ("deadly", "innocent"):
        with pytest.raises(Away, match="it has ended"):
            asking.answer(name, ending(Away))
    first = Held(asking, "innocent")
    assert first.begun.wait(WAIT_S)
    second = Held(asking, "deadly")
    assert asking.answer("other", lambda: "answered") == "answered"
    assert not second.begun.is_set()
    first.end()
    assert second.begun.wait(WAIT_S)
    second.end()
