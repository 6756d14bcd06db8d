"""What is answered while nobody can look at the studies: nothing old as if it were new."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from automesh_service.serve import catalogue as catalogues
from automesh_service.serve import events
from automesh_service.serve.reading.messages import unread
from plugins.service.tests.serve.test_studies import NAME, STUDY
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import Running


@pytest.fixture
def stale(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The service when the last look at its studies is long ago."""
    catalogue = running.service.catalogue
    monkeypatch.setattr(catalogues, "LATE_S", 0.05)
    monkeypatch.setattr(catalogue, "_is_kept_fresh", True)
    monkeypatch.setattr(catalogue, "_looked_s", time.monotonic() - 2 * catalogues.STALE_S)
    monkeypatch.setattr(running.service.metrics, "can_list", True)
    return running


@pytest.fixture
def begun(stale: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The service just after its start: nobody has looked at its studies yet."""
    catalogue = stale.service.catalogue
    monkeypatch.setattr(catalogue, "_looked_s", -math.inf)
    monkeypatch.setattr(catalogue, "_known", {})
    return stale


@pytest.mark.parametrize("path", ["/v1/studies", STUDY, f"{STUDY}/page"])
def test_what_is_too_old_is_refused_until_somebody_has_looked(stale: Running, path: str) -> None:
    reply = stale.ask("GET", path)
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert reply.headers["content-type"] == "application/problem+json"
    assert "too old" in reply.json()["detail"]
    assert stale.ask("GET", "/v1/health").json()["storage"] is False
    # A training script that starts now gets the rule as it was.
    assert stale.ask("GET", f"{STUDY}/rules.toml").status == 200
    stale.service.catalogue.refresh()
    assert stale.ask("GET", "/v1/studies").status == 200
    assert stale.ask("GET", STUDY).status == 200
    assert stale.ask("GET", "/v1/health").json()["storage"] is True


def test_a_look_that_comes_late_is_waited_for(
    stale: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogues, "LATE_S", 300.0)
    catalogue = stale.service.catalogue
    wait_for = catalogue._looked.wait_for  # pyright: ignore[reportPrivateUsage]
    waited: list[float | None] = []

    def waiting(is_so: object, limit_s: float | None = None) -> bool:
        waited.append(limit_s)
        monkeypatch.setattr(catalogue, "_is_kept_fresh", False)  # as after a look
        return wait_for(is_so, limit_s)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(catalogue._looked, "wait_for", waiting)  # pyright: ignore
    assert stale.ask("GET", "/v1/studies").status == 200
    assert waited == [300.0]


def test_of_what_nobody_looks_at_it_is_not_said_that_it_is_over(
    stale: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = stale.service.catalogue.get(NAME)
    holder = stale.service.tokens.check(stale.tokens["admin"])
    assert known is not None

    def seen() -> events.Seen | None:
        watched = events.Watched(submission=None, studies=(known,))
        return events._seen(stale.service, holder, lambda: watched)  # pyright: ignore

    now = seen()
    assert now is not None and not now.is_over
    monkeypatch.setattr(stale.service.catalogue, "_is_kept_fresh", False)
    later = seen()
    assert later is not None and later.is_over


TAILS = ("", "/result.json", "/table.txt", "/rules.toml", "/logs", "/ticket", "/page", "/events")


@pytest.mark.parametrize("tail", [*TAILS, "/rules.toml/diff"])
def test_before_the_first_look_no_study_is_said_to_be_missing(begun: Running, tail: str) -> None:
    """Who is told so does not ask again, though the study is there."""
    is_post = tail.endswith("/diff")
    reply = begun.ask(
        "POST" if is_post else "GET", f"{STUDY}{tail}", body=b"x = 1" if is_post else None
    )
    assert (reply.status, reply.headers.get("retry-after")) == (503, "5"), reply.text
    assert "not known yet" in reply.json()["detail"]


def test_what_is_not_known_may_be_there_while_nobody_can_look(stale: Running) -> None:
    assert stale.ask("GET", "/v1/studies/none/rules.toml").status == 503
    stale.service.catalogue.refresh()
    assert stale.ask("GET", "/v1/studies/none/rules.toml").status == 404


def test_what_a_search_has_left_is_not_told_before_it_was_looked_for(
    begun: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = submit(begun, begun.send_bundle(BUNDLE)).json()["number"]
    path = f"/v1/submissions/{number}"
    for tail in ("", "/events"):
        assert begun.ask("GET", f"{path}{tail}").status == 503, tail
    # Later: of a search that has ended it is not told from memory alone.
    monkeypatch.setattr(begun.service.catalogue, "_looked_s", time.monotonic() - 1e6)
    assert begun.ask("GET", path).json()["studies"] == []
    begun.service.store.end(number, "found", "a rule was found")
    assert begun.ask("GET", path).status == 503
    begun.service.catalogue.refresh()
    assert begun.ask("GET", path).json()["studies"] == []


def test_a_rule_that_was_not_read_yet_is_not_said_to_be_missing(
    stale: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = stale.service.catalogue
    known = catalogue.get(NAME)
    assert known is not None
    fresh = unread(NAME, folder=known.folder, storage="", changed_s=0.0)
    monkeypatch.setattr(catalogue, "_known", {NAME: fresh})
    reply = stale.ask("GET", f"{STUDY}/rules.toml")
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert "not read yet" in reply.json()["detail"]
    read = replace(known, rule="schema = 1\n")
    wait_for = catalogue._looked.wait_for  # pyright: ignore[reportPrivateUsage]

    def waiting(is_so: object, limit_s: float | None = None) -> bool:
        monkeypatch.setattr(catalogue, "_known", {NAME: read})  # as when it was read
        return wait_for(is_so, limit_s)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(catalogue._looked, "wait_for", waiting)  # pyright: ignore
    assert stale.ask("GET", f"{STUDY}/rules.toml").text == "schema = 1\n"
