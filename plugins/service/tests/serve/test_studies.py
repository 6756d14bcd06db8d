"""Studies over HTTP: lists, figures, pages, rules with ETag and diff, logs."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

import automesh
from automesh.errors import UsageError
from automesh.jsonio import from_json
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.pages import MadePage
from automesh_service.serve.studies import StudyPage
from plugins.service.tests.serve.conftest import HOSTILE
from plugins.service.tests.support.service import Running, make_estimated, make_measured, read_all
from tests.support.paths import ROOT
from tests.support.postgres import new_database
from tests.support.storage_fixtures import postgres_url as postgres_url

NAME = "train-gpu-h100-16-0123abcd"
STUDY = f"/v1/studies/{NAME}"


def names(running: Running, query: str) -> list[str]:
    return [one["name"] for one in running.ask("GET", f"/v1/studies?{query}").json()["studies"]]


def test_lists_and_search(running: Running) -> None:
    assert set(names(running, "")) == {NAME, HOSTILE, "broken"}
    assert names(running, "query=TRAIN+fsdp:4") == [NAME]
    assert names(running, "state=unreadable") == ["broken"]
    assert names(running, "target=gpu-h100-16&state=ended") == [NAME]
    assert names(running, "target=nothing") == []
    first = running.ask("GET", "/v1/studies?size=2").json()
    page: StudyPage = from_json(first, StudyPage)
    assert page.studies[0] == running.service.catalogue.listed()[0].summary
    second = running.ask("GET", "/v1/studies?size=2&page=2").json()
    assert (first["total"], first["next"], second["next"]) == (3, 2, None)
    assert len({one["name"] for one in first["studies"] + second["studies"]}) == 3
    assert running.ask("GET", "/v1/studies?size=1000").status == 422


def test_one_study(running: Running) -> None:
    found = running.ask("GET", STUDY, token="read").json()
    study = found["study"]
    assert (study["state"], study["plan"], study["step_s"]) == (
        "ended",
        "fsdp:4,tp:4 remat=full",
        0.25,
    )
    assert study["has_rule"]
    assert 'match = "gpu-h100-16"' in found["rule"]
    broken = running.ask("GET", "/v1/studies/broken").json()["study"]
    assert "not a SQLite database" in broken["problem"]
    table = running.ask("GET", f"{STUDY}/table.txt?width=100").text
    assert "fsdp:4,tp:4" in table
    figures = running.ask("GET", f"{STUDY}/result.json").json()
    assert figures["best"]["plan"] == study["plan"]
    assert running.ask("GET", "/v1/studies/broken/table.txt").status == 422


def test_a_name_is_no_path(running: Running) -> None:
    for name in ("none", "etc", "..%2F..%2Fetc", "%2e%2e", "results%2Fbroken", "a%00b"):
        reply = running.ask("GET", f"/v1/studies/{name}")
        assert reply.status in (400, 404), name


def test_rules_have_a_tag(running: Running) -> None:
    reply = running.ask("GET", f"{STUDY}/rules.toml", token="read")
    tag = reply.headers["etag"]
    assert reply.headers["content-type"].startswith("application/toml")
    for has in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        again = running.ask("GET", f"{STUDY}/rules.toml", If_None_Match=has)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert running.ask("GET", f"{STUDY}/rules.toml", If_None_Match='"x"').status == 200
    missing = running.ask("GET", f"/v1/studies/{quote(HOSTILE)}/rules.toml")
    assert missing.status == 404
    assert "no rule" in missing.json()["detail"]


def test_a_diff_against_the_file_that_one_has(running: Running) -> None:
    mine = '# ours\nschema = 1\naxes = ["dp"]\n\n[[rule]]\nmatch = ".*"\nici = { dp = -1 }\n'

    def diff(text: str) -> str:
        path = f"{STUDY}/rules.toml/diff"
        reply = running.ask("POST", path, token="read", body=text.encode())
        assert reply.status == 200, reply.text
        return reply.text

    changed = diff(mine)
    assert "-" not in {line[:1] for line in changed.splitlines()[2:]}
    assert '+match = "gpu-h100-16"' in changed
    rules = running.ask("GET", f"{STUDY}/rules.toml").text
    assert diff(rules) == ""
    wrong = running.ask("POST", f"{STUDY}/rules.toml/diff", body=b"what = ")
    assert wrong.status == 422
    assert running.audited()[0]["status"] == 422


def test_load_reads_a_url(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{running.url}{STUDY}/rules.toml"
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", running.tokens["read"])
    (rule,) = automesh.load(url).rules
    assert (rule.match, rule.knobs) == ("gpu-h100-16", {"remat": "full"})
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", "amt_wrong")
    with pytest.raises(UsageError, match="not known here"):
        automesh.load(url)
    monkeypatch.delenv("AUTOMESH_SERVER_TOKEN")
    with pytest.raises(UsageError, match="no token"):
        automesh.load(url)
    for wrong in ("http://mesh.example.com/rules.toml", "https://", "http://u:p@127.0.0.1/x"):
        with pytest.raises(UsageError):
            automesh.load(wrong)


def test_logs_are_cleaned_text(running: Running) -> None:
    (log,) = running.ask("GET", f"{STUDY}/logs").json()
    reply = running.ask("GET", f"{STUDY}/logs/{log['name']}")
    assert reply.text == "compiled\n<script>alert(1)</script>\n"
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-next-offset"] == str(log["bytes"])
    assert running.ask("GET", f"{STUDY}/logs/worker-1.log?offset=9").text.startswith("<script>")
    for name in ("..%2Fstudy.db", "study.db", "none.log"):
        assert running.ask("GET", f"{STUDY}/logs/{name}").status in (400, 404)


def test_links_among_logs_are_not_followed(running: Running) -> None:
    (running.service.settings.results / NAME / "logs" / "passwd.log").symlink_to("/etc/passwd")
    assert [one["name"] for one in running.ask("GET", f"{STUDY}/logs").json()] == ["worker-1.log"]
    assert running.ask("GET", f"{STUDY}/logs/passwd.log").status == 404


def test_a_page_needs_a_ticket_and_is_of_no_origin(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadePage(html=b"<!doctype html>", policy="default-src 'none'; sandbox", tag="x")
    monkeypatch.setattr(type(running.service.pages), "page_of", lambda *_: made)
    ticket = running.ask("GET", f"{STUDY}/ticket", token="read").json()["ticket"]
    path = f"{STUDY}/page?ticket={ticket}"
    reply = running.ask("GET", path, token="")
    assert (reply.status, reply.body) == (200, made.html)
    assert reply.headers["content-security-policy"] == made.policy
    assert running.ask("GET", f"{STUDY}/page", token="read").status == 200
    assert running.ask("GET", f"{STUDY}/page", token="").status == 401
    other = f"/v1/studies/broken/page?ticket={ticket}"
    assert running.ask("GET", other, token="").status == 401
    for wrong in ("x", "..", ticket[:-1] + "!", ticket.replace(".", ".9", 1)):
        assert running.ask("GET", f"{STUDY}/page?ticket={wrong}", token="").status == 401
    monkeypatch.setattr("automesh_service.serve.access.time.time", lambda: 4e9)
    assert running.ask("GET", path, token="").status == 401


@pytest.mark.long
def test_the_page_of_a_study_is_its_report(running: Running) -> None:
    reply = running.ask("GET", f"{STUDY}/page")
    assert reply.status == 200, reply.text
    policy = reply.headers["content-security-policy"]
    assert re.search(r"script-src 'sha256-[^;]*;", policy)
    assert "sandbox allow-scripts allow-downloads" in policy
    assert "allow-same-origin" not in policy
    assert b'id="document"' in reply.body


@pytest.mark.slow
def test_a_study_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    with closing(Catalogue(lambda: [tmp_path])) as catalogue:
        check_changes(catalogue, tmp_path)


def refresh(catalogue: Catalogue) -> None:
    read_all(catalogue)


def check_changes(catalogue: Catalogue, tmp_path: Path) -> None:
    assert not catalogue.refresh()
    assert catalogue.known() == {}
    make_estimated(tmp_path / "train-gpu-h100-16-1")
    refresh(catalogue)
    before = catalogue.get("train-gpu-h100-16-1")
    assert before is not None
    assert (before.summary.state, before.rule) == ("stopped", "")
    catalogue.refresh()
    catalogue.refresh()
    same = catalogue.get("train-gpu-h100-16-1")
    catalogue.refresh()
    assert catalogue.get("train-gpu-h100-16-1") is same
    make_measured(tmp_path / "train-gpu-h100-16-1")
    catalogue.refresh()
    after = catalogue.get("train-gpu-h100-16-1")
    assert after is not None
    assert (after.summary.state, after.summary.has_rule) == ("ended", True)
    for number in range(2, 4):
        make_estimated(tmp_path / f"train-gpu-h100-16-{number}")
    assert catalogue.refresh(most=1)
    states = sorted(one.summary.state for one in catalogue.known().values())
    assert states == ["ended", "stopped", "unread"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("step_s", [math.inf, math.nan])
def test_a_figure_that_is_none_spoils_no_list(tmp_path: Path, step_s: float) -> None:
    """What a search has written may be anything; browsers read no list with `Infinity` in it."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    make_measured(tmp_path / "train-gpu-h100-16-0123abcd", step_s=step_s)
    with closing(Catalogue(lambda: [tmp_path])) as catalogue:
        refresh(catalogue)
        (one,) = catalogue.listed()
    assert json.loads(one.text, parse_constant=refuse)["step_s"] is None
    assert one.summary.state == "ended"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_studies_in_one_storage(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    storage = str(tmp_path / "all.db")
    if kind == "postgres":
        storage = new_database(request.getfixturevalue("postgres_url"))
    results = tmp_path / "results"
    for number in range(2):
        make_measured(results / f"train-gpu-h100-16-{number}", storage=storage)
    # What an agent has sent lies beside it.
    job = tmp_path / "job" / "results"
    make_measured(job / "train-gpu-h100-16-2")
    with closing(Catalogue(lambda: [results, job], storage)) as catalogue:
        check_storage(catalogue, results, job, storage)


def check_storage(catalogue: Catalogue, results: Path, job: Path, storage: str) -> None:
    refresh(catalogue)
    known = catalogue.known()
    assert sorted(known) == [f"train-gpu-h100-16-{number}" for number in range(3)]
    assert [known[name].storage for name in sorted(known)] == [storage, storage, ""]
    assert all(json.loads(catalogue.result(one))["best"] for one in known.values())
    assert all(one.summary.has_rule for one in known.values())
    make_measured(results / "train-gpu-h100-16-1", storage=storage, step_s=0.125)
    refresh(catalogue)
    again = catalogue.known()
    assert again["train-gpu-h100-16-1"].summary.step_s == 0.125
    assert again["train-gpu-h100-16-0"] is known["train-gpu-h100-16-0"]
    listed = catalogue.listed()
    assert listed[0].summary is again[listed[0].summary.name].summary
    assert listed[0].summary.name == "train-gpu-h100-16-2"  # of the others no trial has ended
    assert sorted(one.summary.name for one in listed) == sorted(again)
    assert catalogue.listed() is listed
    assert catalogue.below(job) == ("train-gpu-h100-16-2",)
    assert catalogue.below(job.parent) == ()
    make_measured(results / "train-gpu-h100-16-0", storage=storage, step_s=0.25)
    refresh(catalogue)
    later = {one.summary.name: one for one in catalogue.listed()}
    before = {one.summary.name: one for one in listed}
    assert '"step_s": 0.25' in later["train-gpu-h100-16-0"].text
    assert later["train-gpu-h100-16-1"] is before["train-gpu-h100-16-1"]


@pytest.mark.long
def test_the_server_imports_no_jax() -> None:
    code = (
        "import sys, automesh_service.serve.server, automesh_service.submissions.runner\n"
        "import automesh_service.remote.submit\n"
        "assert not {'jax', 'jaxlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=600)
