"""What a server knows of its studies, from what the process that reads them says: without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from automesh_service.serve import catalogue as catalogues
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.reading import reader, scan
from automesh_service.serve.reading.messages import Message, known_of, to_message
from automesh_service.serve.reading.reader import Away
from automesh_service.serve.reading.summary import KnownStudy, State, StudySummary

NAME = "train-gpu-h100-16-1"
RULE = "schema = 1\n"


@pytest.fixture
def catalogue() -> Iterator[Catalogue]:
    with closing(Catalogue(list)) as found:
        yield found


def study(state: State, *, name: str = NAME, rule: str = "", stamp: str = "1") -> KnownStudy:
    target = "" if state == "unreadable" else "gpu-h100-16"
    problem = "its database is away" if state == "unreadable" else ""
    summary = StudySummary(
        name=name, state=state, target=target, has_rule=bool(rule), problem=problem
    )
    missing = "" if rule else problem or "there is none"
    folder = Path("results") / name
    return known_of(summary, folder=folder, storage="", rule=rule, missing=missing, stamp=stamp)


def hear(catalogue: Catalogue, *messages: Message) -> None:
    for message in messages:
        catalogue._hear(message)  # pyright: ignore[reportPrivateUsage]


def read(catalogue: Catalogue, one: KnownStudy) -> KnownStudy:
    """A study after it was read."""
    hear(catalogue, {"study": to_message(one)})
    return catalogue.known()[one.summary.name]


def check_rule_of_unreadable(found: KnownStudy) -> None:
    assert (found.summary.state, found.rule, found.missing) == ("unreadable", RULE, "")
    assert (found.summary.target, found.summary.has_rule) == ("gpu-h100-16", True)
    assert '"has_rule": true' in found.text
    assert found.summary.problem


def test_a_study_that_cannot_be_read_any_more_keeps_its_rule(catalogue: Catalogue) -> None:
    assert read(catalogue, study("ended", rule=RULE)).rule == RULE
    for stamp in ("2", "3"):
        found = read(catalogue, study("unreadable", stamp=stamp))
        check_rule_of_unreadable(found)
        assert found.stamp == stamp
    assert read(catalogue, study("stopped")).rule == ""  # It was read, and has none.
    assert read(catalogue, study("unreadable")).missing == "its database is away"


def test_what_is_known_is_as_old_as_the_last_look(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(catalogues, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(catalogues, "LATE_S", 0.0)
    catalogue.keep_fresh()
    assert (catalogue.is_fresh, catalogue.has_looked) == (False, False)
    fresh: list[bool] = []

    def look(_: Message, known: object, hear: Callable[[Message], None]) -> None:
        nonlocal now_s
        del known
        hear({"new": [to_message(study("unread", stamp=""))], "gone": []})
        # A process that looks no more is replaced before what is known is too old.
        now_s += scan.LOOK_S + reader.SILENT_S
        fresh.append(catalogue.is_fresh)
        hear({"study": to_message(study("ended"))})
        hear({"is_behind": True})

    monkeypatch.setattr(catalogue._reader, "look", look)  # pyright: ignore[reportPrivateUsage]
    assert catalogue.refresh()
    assert fresh == [True]
    catalogue.wait_until_fresh()
    now_s += catalogues.STALE_S
    with pytest.raises(Away, match="too old"):
        catalogue.wait_until_fresh()
