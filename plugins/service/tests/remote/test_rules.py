"""Rules from a service, for who trains."""

from __future__ import annotations

import pytest

import automesh
from automesh.errors import UsageError
from automesh_service.remote import rules
from automesh_service.remote.answers import Answer
from automesh_service.remote.client import Server
from automesh_service.remote.patience import RefusedRequest

URL = "http://127.0.0.1:1/v1/studies/train-cpu-2/rules.toml"
RULE = b'schema = 1\naxes = ["dp"]\n\n[[rule]]\nmatch = "cpu-2"\nici = { dp = 2 }\n'


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the service answers before it hands the rule out; nobody listens anywhere."""
    said: list[int] = []

    def ask(*_: object, **__: object) -> Answer:
        if said:
            raise RefusedRequest("the studies were not read yet", status=said.pop(0))
        return Answer(status=200, headers={}, body=RULE)

    monkeypatch.setattr(Server, "ask", ask)
    monkeypatch.setattr(rules, "_PAUSE_S", 0.0)
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", "x")
    return said


def test_a_service_that_is_started_again_is_waited_for(refusals: list[int]) -> None:
    """Before, a training that began in these seconds ended."""
    refusals += [503, 429, 503]
    (rule,) = automesh.load(URL).rules
    assert rule.match == "cpu-2"
    assert refusals == []


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_what_will_stay_so_is_said_at_once(refusals: list[int], status: int) -> None:
    refusals += [status, 503]
    with pytest.raises(UsageError, match="not read yet"):
        automesh.load(URL)
    assert refusals == [503]


def test_nobody_waits_for_ever(refusals: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_BACK_S", 0.0)
    refusals += [503] * 1000
    with pytest.raises(UsageError, match="not read yet"):
        automesh.load(URL)
    assert refusals
