"""The commands that talk to a service, against one whose searches are made up."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from automesh.errors import UsageError
from automesh_service.remote import credentials, patience
from automesh_service.remote import submit as submits
from automesh_service.remote.answers import Answer
from automesh_service.remote.client import Server, open_server
from automesh_service.remote.credentials import forget_server, leave_word, token_for
from automesh_service.serve import events
from plugins.service.tests.support.service import Running, make_measured, read_all, running_service
from tests.support.cases import bad_inputs_run
from tests.support.cases.bad_inputs import GOOD
from tests.support.cases.bad_inputs_run import Ran


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr(events, "_QUIET_S", 0.05)
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text(GOOD)
    (folder / "lib" / "model.py").write_text("")
    (folder / "space.toml").write_text("[axes]\ndp = {}\n")
    return folder


def automesh(running: Running, folder: Path, command: str, token: str = "submit") -> Ran:
    given = {
        "AUTOMESH_SERVER": running.url,
        "AUTOMESH_SERVER_TOKEN": running.tokens[token],
        "COLUMNS": "100",
    }
    return bad_inputs_run.run(command, folder, given)


def test_the_same_command_is_the_same_submission(running: Running, project: Path) -> None:
    command = "submit train.py:build --target cpu:2 --space space.toml --detach -- --size 3"
    first = automesh(running, project, command)
    assert first.code == 0, first.stderr
    number = first.stdout.strip()
    again = automesh(running, project, command)
    assert again.stdout.strip() == number
    assert "which was there already" in again.stderr
    found = running.service.store.get(number, "ann")
    order = found.order
    assert (order.entry, order.space, order.args) == (
        "train.py:build",
        "space.toml",
        ("--size", "3"),
    )
    assert running.service.store.bundle(found.digest, "ann").files == (
        "lib/model.py",
        "space.toml",
        "train.py",
    )
    other = automesh(running, project, f"{command.replace('--detach', '--detach --new')}")
    assert other.stdout.strip() not in ("", number)
    (project / "lib" / "model.py").write_text("x = 1\n")
    assert automesh(running, project, command).stdout.strip() != number
    # One that has ended without a rule goes on.
    running.service.store.end(number, "cancelled", "as asked")
    (project / "lib" / "model.py").write_text("")
    assert automesh(running, project, command).stdout.strip() == number
    assert running.service.store.get(number, "ann").state == "queued"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("submit train.py", marks=pytest.mark.long),
        "search train.py --server URL",
    ],
)
def test_a_rule_is_taken_home(running: Running, project: Path, command: str) -> None:
    command = f"{command.replace('URL', running.url)} --target gpu-h100-16"
    began = automesh(running, project, "submit train.py --target gpu-h100-16 --detach")
    number = began.stdout.strip()
    job = running.service.home.job(number)
    if not job.exists():
        make_measured(job / "results" / f"train-gpu-h100-16-{number[:8]}")
        (job / "search.log").write_text("compile 9/9\n\x1b[31mdone\n")
    running.service.store.end(number, "found", "a rule was found")
    read_all(running.service.catalogue)
    done = automesh(running, project, command)
    assert done.code == 0, done.stderr
    assert "fsdp:4,tp:4" in done.stdout
    assert "compile 9/9\ndone\n" in done.stderr
    assert "merged the rule for gpu-h100-16" in done.stderr
    (rule,) = tomllib.loads((project / "mesh_rules.toml").read_text())["rule"]
    assert (rule["match"], rule["knobs"]) == ("gpu-h100-16", {"remat": "full"})
    as_json = automesh(running, project, f"{command} --json")
    assert json.loads(as_json.stdout)["best"]["plan"] == "fsdp:4,tp:4 remat=full"


def test_a_study_that_the_service_has_not_read_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the service: it is no study without a rule."""
    rule = 'schema = 1\naxes = ["dp"]\n\n[[rule]]\nmatch = "cpu-2"\nici = { dp = 2 }\n'
    said = [
        {"study": {"state": "unread", "target": ""}, "rule": "", "missing": "not read yet"},
        {"study": {"state": "ended", "target": "cpu-2"}, "rule": rule, "missing": ""},
    ]

    def ask(*_: object, **__: object) -> Answer:
        return Answer(status=200, headers={}, body=json.dumps(said.pop(0)).encode())

    monkeypatch.setattr(Server, "ask", ask)
    monkeypatch.setattr(patience, "_PAUSE_S", 0.0)
    server = Server(url="http://127.0.0.1:1", token="x", is_local=True)
    path = tmp_path / "mesh_rules.toml"
    assert submits.take_rules(server, ["train-cpu-2"], path) == ["cpu-2"]
    assert tomllib.loads(path.read_text())["rule"][0]["ici"] == {"dp": 2}


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        pytest.param("nothing", 1, "no plan could be measured", marks=pytest.mark.long),
        ("failed", 2, "ended as failed: no plan could"),
    ],
)
def test_how_it_ended_is_the_exit_code(
    running: Running,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Literal["nothing", "failed"],
    code: int,
    said: str,
) -> None:
    command = f"submit train.py --target cpu:4 --baseline dp:{code}"
    number = automesh(running, project, f"{command} --detach").stdout.strip()
    store = running.service.store
    store.end(number, state, "no plan could be measured")
    # It is resumed by the command, and has ended again at once.
    monkeypatch.setattr(store, "resume", store.get)
    done = automesh(running, project, command)
    assert (done.code, said in done.stderr) == (code, True), done.stderr


def test_what_a_service_cannot_take_is_refused_here(running: Running, project: Path) -> None:
    for command, said in (
        ("search train.py --server URL --storage x.db", "--storage"),
        ("submit lib/model.py --space space.toml --folder lib", "is not in the folder"),
        ("submit train.py --server URL/v1", "path"),
        ("submit os:path", "no script"),
    ):
        done = automesh(running, project, command.replace("URL", running.url))
        assert (done.code, said in done.stderr) == (2, True), done.stderr
    read = automesh(running, project, "submit train.py --target cpu:2", token="read")
    assert (read.code, "may read" in read.stderr) == (2, True)
    assert "Traceback" not in read.stderr


def test_tokens_come_from_the_environment_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def user_state_path(_: str) -> Path:
        return tmp_path / "state"

    monkeypatch.setattr(credentials.platformdirs, "user_state_path", user_state_path)
    file = tmp_path / "token"
    file.write_text("amt_file\n")
    file.chmod(0o600)
    named = {"AUTOMESH_SERVER_TOKEN_FILE": str(file)}
    assert token_for(1, is_local=False, environ=named) == "amt_file"
    assert token_for(1, is_local=True, environ={**named, "AUTOMESH_SERVER_TOKEN": "x"}) == "x"
    file.chmod(0o640)
    with pytest.raises(UsageError, match="others may read"):
        token_for(1, is_local=False, environ=named)
    # A service of this account leaves word, for as long as it lives.
    leave_word(8700, "amt_word")
    assert token_for(8700, is_local=True, environ={}) == "amt_word"
    for port, is_local in ((8701, True), (8700, False)):
        with pytest.raises(UsageError, match="no token"):
            token_for(port, is_local=is_local, environ={})
    (word,) = (tmp_path / "state").rglob("*.json")
    assert word.stat().st_mode & 0o777 == 0o600
    word.write_text(word.read_text().replace('"created_s": ', '"created_s": 1'))
    with pytest.raises(UsageError, match="no token"):  # Its process is another one now.
        token_for(8700, is_local=True, environ={})
    forget_server(8700)
    assert not word.exists()


def test_nobody_there_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", "amt_x")
    server, path = open_server("http://localhost:1/v1/x?y=1")
    assert (server.url, path, server.is_local) == ("http://localhost:1", "/v1/x?y=1", True)
    with pytest.raises(UsageError, match="cannot be reached"):
        server.ask("GET", path)
    assert "amt_x" not in repr(server)
    assert not open_server("https://mesh.example.com")[0].is_local
