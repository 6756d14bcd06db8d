"""What is answered while nobody can look at the studies: nothing old as if it were new."""

from __future__ import annotations

import math

import pytest

from automesh.serve import catalogue as catalogues
from automesh.serve import events
from tests.serve.test_studies import NAME, STUDY
from tests.support.service import Running


@pytest.fixture
def stale(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The service when the last look at its studies is long ago."""
    catalogue = running.service.catalogue
    monkeypatch.setattr(catalogues, "LATE_S", 0.05)
    monkeypatch.setattr(catalogue, "_is_kept_fresh", True)
    monkeypatch.setattr(catalogue, "_looked_s", -math.inf)
    monkeypatch.setattr(running.service.metrics, "can_list", True)
    return running


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
