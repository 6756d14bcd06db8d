"""Submissions over HTTP: whose they are, what repeats, who did what."""

from __future__ import annotations

import uuid
from typing import Any

from plugins.service.tests.support.service import SCRIPT, Reply, Running, order, tar_of

BUNDLE = tar_of({"train.py": SCRIPT})


def submit(
    running: Running, digest: str, *, token: str = "submit", key: str = "", **changes: Any
) -> Reply:
    body = {"bundle": digest, "order": order(**changes)}
    key = key or uuid.uuid4().hex
    return running.ask("POST", "/v1/studies", token=token, body=body, Idempotency_Key=key)


def test_a_submission_is_made_once_for_each_key(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    assert running.send_bundle(BUNDLE) == digest
    first = submit(running, digest, key="first-key")
    assert (first.status, first.json()["state"]) == (201, "queued")
    number = first.json()["number"]
    assert first.headers["location"] == f"/v1/submissions/{number}"
    again = submit(running, digest, key="first-key")
    assert (again.status, again.json()) == (200, first.json())
    assert submit(running, digest, key="first-key", budget="2m").status == 409
    assert submit(running, digest, key="short").status == 422
    assert submit(running, digest, key="é" * 10).status == 422
    without = running.ask("POST", "/v1/studies", token="submit", body={"bundle": digest})
    assert without.status == 422
    latest = running.ask("GET", "/v1/submissions", token="submit").json()["submissions"]
    assert [one["number"] for one in latest].count(number) == 1


def test_what_is_not_known_or_misspelt_is_refused(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    wrong: tuple[dict[str, Any], ...] = (
        {"budgt": "1m"},
        {"entry": "../x.py"},
        {"entry": 3},
        {"targets": "cpu:2"},
        {"targets": []},
        {"top": "many"},
        {"storage": "postgresql://x/y"},
        {"rules": "/etc/passwd"},
    )
    for changes in wrong:
        reply = submit(running, digest, **changes)
        assert reply.status == 422, changes
        assert "Traceback" not in reply.text
    assert submit(running, "0" * 64).status == 404
    assert submit(running, "../../etc/passwd").status == 422


def test_two_users_do_not_see_each_others_submissions(running: Running) -> None:
    mine = tar_of({"train.py": SCRIPT, "secret.py": b"x = 1\n"})
    digest = running.send_bundle(mine)
    number = submit(running, digest).json()["number"]
    path = f"/v1/submissions/{number}"
    assert running.ask("GET", f"/v1/bundles/{digest}", token="submit").body == mine
    assert running.ask("GET", f"/v1/bundles/{digest}", token="admin").body == mine
    assert running.ask("GET", f"/v1/bundles/{digest}", token="read").status == 403
    assert running.ask("GET", f"/v1/bundles/{digest}", token="bob").status == 404
    # To know the name of a bundle is not to have it.
    assert submit(running, digest, token="bob").status == 404
    for tail in ("", "/log", "/rules.toml", "/events"):
        assert running.ask("GET", f"{path}{tail}", token="bob").status == 404, tail
    for what in ("cancel", "resume"):
        assert running.ask("POST", f"{path}/{what}", token="bob").status == 404
    body = {"budget": "2m"}
    theirs = running.ask(
        "POST", f"{path}/extend", token="bob", body=body, Idempotency_Key="bobs-key-1"
    )
    assert theirs.status == 404
    listed = running.ask("GET", "/v1/submissions", token="bob").json()["submissions"]
    assert number not in {one["number"] for one in listed}
    assert running.ask("GET", path, token="admin").status == 200
    # The audit tells who did it, and who could not.
    said = [(one["who"], one["action"], one["status"]) for one in running.audited()]
    assert ("ann", "POST /v1/studies", 201) in said
    assert ("bob", f"POST {path}/cancel", 404) in said
    assert running.ask("GET", "/v1/audit", token="submit").status == 403


def test_cancel_resume_and_extend(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    path = f"/v1/submissions/{submit(running, digest).json()['number']}"
    assert running.ask("POST", f"{path}/cancel", token="submit").json()["state"] == "cancelled"
    assert running.ask("POST", f"{path}/resume", token="submit").json()["state"] == "queued"
    assert running.ask("POST", f"{path}/cancel", token="admin").json()["state"] == "cancelled"

    def extend(budget: str, key: str) -> Reply:
        body = {"budget": budget}
        return running.ask("POST", f"{path}/extend", token="submit", body=body, Idempotency_Key=key)

    longer = extend("3m", "extend-1").json()
    assert (longer["state"], longer["order"]["budget"]) == ("queued", "3m")
    assert extend("3m", "extend-1").json() == longer
    assert extend("4m", "extend-1").status == 409
    assert extend("forever", "extend-2").status == 422
    assert running.ask("GET", f"{path}/rules.toml", token="submit").status == 404
    changes = [one for one in running.audited() if one["subject"] == path.rpartition("/")[2]]
    assert [(one["who"], one["action"].rpartition("/")[2]) for one in changes[-3:]] == [
        ("ann", "resume"),
        ("ann", "cancel"),
        ("ann", "studies"),
    ]


def test_the_service_tells_of_itself(running: Running) -> None:
    assert running.ask("GET", "/v1/me", token="submit").json()["name"] == "ann"
    assert running.ask("GET", "/v1/hosts", token="read").json() == []
    schema = running.ask("GET", "/v1/openapi.json", token="").json()
    assert {"/v1/studies", "/v1/submissions/{number}/extend"} <= set(schema["paths"])
    body = schema["components"]["schemas"]["OrderBody"]
    assert body["additionalProperties"] is False
    metrics = running.ask("GET", "/metrics", token="read").text
    assert 'automesh_requests_total{method="POST",route="/v1/studies",status="201"}' in metrics
    assert running.ask("GET", "/metrics", token="").status == 401
    # Nothing runs here, and nobody has looked for studies: it says so.
    health = running.ask("GET", "/v1/health", token="")
    assert (health.status, health.json()["runner"]) == (503, False)
