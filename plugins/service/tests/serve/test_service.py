"""How a service keeps what it knows of its studies up to date: what it logs, how long it rests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from automesh.errors import UsageError
from automesh_service.serve import service as services
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.metrics import Metrics
from automesh_service.serve.reading.reader import ReadingFailed
from plugins.service.tests.support.service import Running


class FakeCatalogue:
    """Studies of which each look does what the test says."""

    def __init__(self, *looks: Callable[[], bool]) -> None:
        self.looks = list(looks)

    def keep_fresh(self) -> None:
        pass

    def refresh(self) -> bool:
        return self.looks.pop(0)()


class FakeClosing(threading.Event):
    """Rests for no time; the service closes after the last look."""

    def __init__(self, catalogue: FakeCatalogue) -> None:
        super().__init__()
        self._catalogue = catalogue
        self.rests_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.rests_s.append(timeout)
        if not self._catalogue.looks:
            self.set()
        return self.is_set()


def rests_of(running: Running, *looks: Callable[[], bool]) -> list[float]:
    """Has a service keep up; returns how long it rests after each look."""
    fake = FakeCatalogue(*looks)
    closing = FakeClosing(fake)
    catalogue = cast(Catalogue, fake)
    replace(running.service, catalogue=catalogue, metrics=Metrics(), closing=closing).keep_up()
    return closing.rests_s


def failing(error: Exception) -> Callable[[], bool]:
    def look() -> bool:
        raise error

    return look


def test_the_log_says_once_why_studies_cannot_be_looked_at(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    down = UsageError("the storage postgresql://mesh:secret@db/mesh is away", hint="start it")
    other = ReadingFailed("ValueError")
    looks = [failing(one) for one in (down, down, down, other)]
    rests_s = rests_of(running, *looks, lambda: False, failing(other), lambda: False)
    assert rests_s == [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0]
    said = [one.getMessage() for one in caplog.records if one.name == "automesh.serve"]
    assert len(said) == 3
    assert "cannot be looked at: the storage" in said[0]
    assert "is away" in said[0]
    assert "secret" not in said[0]
    assert [one.endswith("ReadingFailed: ValueError") for one in said] == [False, True, True]


@pytest.mark.parametrize(
    ("took_s", "is_behind", "rest_s"),
    [
        (0.0, True, 0.05),
        (0.2, False, 1.0),
        (12.0, True, 12.0),
        (25.0, True, 5.0),
        # One study has kept its lock: what is known is old already.
        (59.0, True, 0.05),
        (130.0, True, 0.05),
        (130.0, False, 0.05),
    ],
)
def test_after_a_long_look_there_is_no_long_rest(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    took_s: float,
    is_behind: bool,
    rest_s: float,
) -> None:
    now_s = 0.0

    def look() -> bool:
        nonlocal now_s
        now_s += took_s
        return is_behind

    monkeypatch.setattr(services, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert rests_of(running, look) == [rest_s]
