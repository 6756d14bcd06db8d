"""The password of a storage is nowhere but with the server: not in files, tables and output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import optuna
import psycopg
import pytest
import sqlalchemy.exc as sa_errors

from automesh.cli import guard
from automesh.errors import UsageError
from automesh.texts.storage_url import PASSWORD, PASSWORD_FILE
from automesh.tuner.request import SearchOptions, read_request
from automesh.tuner.study.backend import explained, open_backend
from automesh.tuner.study.metadata import shown_location
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import open_study
from tests.support.cases import bad_inputs_run
from tests.support.cases.bad_inputs import GOOD
from tests.support.cases.bad_inputs_run import Ran
from tests.support.fakes import command_runs
from tests.support.paths import ROOT
from tests.support.postgres import postgres_server

ADMIN = "the server's own"
# Whatever a wrong mask leaves of a password, one of these is in it.
MARKS = ("kestrel", "falcon")
NOTE = "note: other users of this machine can read the password in --storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to give a password.

    Attributes:
      password: that the server wants.
      url: with `{place}` for host, port and database.
      variables: of the environment; `{folder}` is where the test is.
      files: what is in this folder, readable by its owner alone; `{place}` as libpq wants it.
    """

    password: str = "kestrel/falcon"
    url: str = "postgresql://me@{place}"
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def written(self, place: str, folder: Path) -> tuple[str, dict[str, str]]:
        """The URL and the variables; the files are in the folder then."""
        for name, content in self.files.items():
            (folder / name).write_text(content)
            (folder / name).chmod(0o600)
        variables = {key: text.format(folder=folder) for key, text in self.variables.items()}
        return self.url.format(place=place, folder=folder), variables

    @property
    def is_in_the_command(self) -> bool:
        return any(mark in self.url for mark in MARKS)


FORMS = {
    "slash": Form(url="postgresql://me:kestrel/falcon@{place}"),
    "space": Form(
        password="kestrel fal con", url="postgresql+psycopg://me:kestrel fal con@{place}"
    ),
    "at": Form(password="kestrel@falcon", url="postgresql://me:kestrel@falcon@{place}"),
    "escapes": Form(
        password="kestrel@/%'\"`$ falcon",
        url="postgresql://me:kestrel%40%2F%25%27%22%60%24%20falcon@{place}",
    ),
    "query": Form(url="postgresql://{place}?user=me&password=kestrel%2Ffalcon"),
    "query-at": Form(
        password="kestrel@falcon", url="postgresql://{place}?user=me&password=kestrel@falcon"
    ),
    "sslpassword": Form(
        url="postgresql://me@{place}?sslmode=prefer&sslpassword=kestrel falcon",
        variables={PASSWORD: "kestrel/falcon"},
    ),
    "variable": Form(variables={PASSWORD: "kestrel/falcon"}),
    "file": Form(variables={PASSWORD_FILE: "{folder}/word"}, files={"word": "kestrel/falcon\n"}),
    "pgpassword": Form(variables={"PGPASSWORD": "kestrel/falcon"}),
    "pgpassfile": Form(
        variables={"PGPASSFILE": "{folder}/word"}, files={"word": "*:*:*:me:kestrel/falcon\n"}
    ),
    "home": Form(variables={"HOME": "{folder}"}, files={".pgpass": "*:*:*:*:kestrel/falcon\n"}),
    "passfile": Form(
        url="postgresql://me@{place}?passfile={folder}/word",
        files={"word": "*:*:*:me:kestrel/falcon\n"},
    ),
}


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    """Host and port of a server that asks for passwords, with a user `me`."""
    with postgres_server(ADMIN) as url:
        place = url.partition("@")[2].partition("/")[0]
        with _admin(place) as connection:
            connection.execute("CREATE ROLE me LOGIN")
        yield place


def _admin(place: str, database: str = "postgres") -> psycopg.Connection:
    url = f"postgresql://postgres@{place}/{database}"
    return psycopg.connect(url, password=ADMIN, autocommit=True)


def database_for(server: str, name: str, password: str) -> str:
    """An empty database of the user `me`, who has this password now; its place."""
    with _admin(server) as connection:
        connection.execute(f"CREATE DATABASE {name} OWNER me".encode())
        word = password.replace("'", "''")
        connection.execute(f"ALTER ROLE me PASSWORD '{word}'".encode())
    return f"{server}/{name}"


def rows_of(place: str) -> list[str]:
    """All rows of all tables of a database, as JSON."""
    server, _, name = place.partition("/")
    found: list[str] = []
    with _admin(server, name) as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()
        for (table,) in tables:
            rows = connection.execute(f'SELECT row_to_json(t)::text FROM "{table}" t'.encode())
            found += [f"{table}: {row}" for (row,) in rows]
    return found


def leaks(texts: Mapping[str, str | bytes]) -> list[str]:
    """Where a mark of the password stands, in plain text or in an encoding that keeps letters."""
    return [
        f"{name}: {mark}"
        for name, text in texts.items()
        for mark in MARKS
        if mark.encode() in (text.encode() if isinstance(text, str) else text)
    ]


def said_by(name: str, ran: Ran) -> dict[str, str]:
    return {f"stdout of {name}": ran.stdout, f"stderr of {name}": ran.stderr}


def files_in(folder: Path, form: Form) -> dict[str, bytes]:
    """All files but those that the user has put the password into."""
    contents = bad_inputs_run.contents(folder)
    return {name: content for name, content in contents.items() if name not in form.files}


# A search takes two seconds: in CI one form for each way that it takes through the program.
IN_CI = ("slash", "file")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "form", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.long) for one in FORMS]
)
def test_a_search_with_a_password_leaves_it_nowhere(
    form: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = FORMS[form]
    command_runs.install(monkeypatch.setattr)
    place = database_for(server, f"form_{form.replace('-', '_')}", given.password)
    url, variables = given.written(place, tmp_path)
    storage = ["--storage", url]

    def run(*words: str) -> Ran:
        return bad_inputs_run.run(shlex.join([*words, *storage]), tmp_path, variables)

    options = ["--command", command_runs.COMMAND, "--target", command_runs.TARGET]
    texts: dict[str, str | bytes] = {}
    searched = run("search", *options, "--timed-steps", "2")
    assert searched.code == 0, searched.stderr
    (study,) = (tmp_path / "results").glob("train-cpu-2-*")
    commands = {
        "search": searched,
        "search --json": run("search", *options, "--timed-steps", "2", "--json"),
        "show": run("show"),
        "show --json": run("show", str(study), "--json"),
        "explain": run("explain", str(study), "fsdp:2"),
    }
    codes = [one.code for one in commands.values()]
    assert codes == [0, 0, 0, 0, 2]  # A command's programs are not seen by `explain`.
    for name, ran in commands.items():
        texts |= said_by(name, ran)
    rows = rows_of(place)
    assert any("automesh.header" in row for row in rows)
    texts |= {f"row {number}": row for number, row in enumerate(rows)}
    texts |= files_in(tmp_path, given)
    assert leaks(texts) == []
    noted = {NOTE in ran.stderr for ran in commands.values()}
    assert noted == {given.is_in_the_command}

    # The command that is shown has the rest of the URL, and works with a password from elsewhere.
    shown = json.loads(commands["show --json"].stdout)["command"].replace("TMP", str(tmp_path))
    words = shlex.split(shown)
    assert words[:2] == ["automesh", "search"]
    assert f"{place}" in words[words.index("--storage") + 1]
    monkeypatch.setenv("PGUSER", "me")  # of a URL with the user in its query
    again = bad_inputs_run.run(shlex.join(words[1:]), tmp_path, {PASSWORD: given.password})
    assert again.code == 0, again.stderr
    assert NOTE not in again.stderr


@pytest.mark.parametrize("form", [one for one in FORMS if one not in IN_CI])
def test_every_form_opens_a_study_that_does_not_have_it(
    form: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = database_for(server, f"open_{form.replace('-', '_')}", FORMS[form].password)
    url, variables = FORMS[form].written(place, tmp_path)
    for name in (PASSWORD, PASSWORD_FILE, "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    storage = parse_storage(url, tmp_path)
    with open_study(storage, "a") as study:
        study.note("location", shown_location(study))
        engine = study._backend.optuna.engine  # pyright: ignore
        shown = {"engine": repr(engine), "url": str(study._backend.optuna.url)}  # pyright: ignore
        # Not even in what Optuna and SQLAlchemy keep of the URL.
        shown["whole"] = engine.url.render_as_string(hide_password=False)
    texts = {f"row {number}": row for number, row in enumerate(rows_of(place))}
    assert leaks(shown | texts | {"storage": repr(storage), "text": storage.text}) == []
    assert any("automesh.location" in text for text in texts.values())


@pytest.mark.parametrize("form", [name for name, one in FORMS.items() if one.is_in_the_command])
def test_a_server_that_refuses_tells_no_password(
    form: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = database_for(server, f"no_{form.replace('-', '_')}", "another one")
    monkeypatch.setenv(PASSWORD, "kestrel falcon")
    url = FORMS[form].url.format(place=place)
    with pytest.raises(UsageError, match=r"cannot be reached: .*authentication failed") as caught:
        parsed = parse_storage(url, tmp_path)
        open_backend(parsed)
    trace = "".join(traceback.format_exception(caught.value))
    # The lines of a traceback quote this test, which names no mark.
    assert leaks({"error": str(caught.value), "traceback": trace, "storage": repr(parsed)}) == []
    assert PASSWORD in caught.value.hint


def test_a_url_in_the_command_or_in_arguments_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the searched program: kept in a journal, in JSON, in the rule, shown in progress."""
    command_runs.install(monkeypatch.setattr)
    database = "--db 'postgresql://me:kestrel falcon@h/db' --cache=redis://:kestrel@h"
    template = command_runs.COMMAND.replace("--fsdp", f"{database} --fsdp")
    words = ["search", "--command", template, "--target", command_runs.TARGET]
    words += ["--storage", "study.journal"]
    texts: dict[str, str | bytes] = {}
    for extra in (["--dry-run"], ["--dry-run", "--json"], [], ["--json"]):
        ran = bad_inputs_run.run(shlex.join([*words, *extra]), tmp_path)
        assert ran.code == 0, ran.stderr
        texts |= said_by(f"search {extra}", ran)
    shown = bad_inputs_run.run("show --json --storage study.journal", tmp_path)
    texts |= said_by("show", shown) | bad_inputs_run.contents(tmp_path)
    assert leaks(texts) == []
    result = json.loads(shown.stdout)
    # Everything else of the command is there.
    hidden = "--db 'postgresql://me:***@h/db' '--cache=redis://:***@h'"
    assert hidden in result["template"]
    assert result["template"].endswith("--fsdp {fsdp} --tp {tp}")
    assert f"{hidden} --fsdp 2 --tp 1" in result["best_command"]
    assert "postgresql://me:***@h/db" in (tmp_path / "mesh_rules.toml").read_text()
    assert b"postgresql://me:***@h/db" in (tmp_path / "study.journal").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--dry-run"], pytest.param(["--budget", "3m", "--top", "1"], marks=pytest.mark.long)],
)
def test_a_script_and_its_arguments(options: list[str], server: str, tmp_path: Path) -> None:
    """Beside the study: estimates, terms, logs of workers, executables, the rule."""
    place = database_for(server, f"script_{len(options)}", "kestrel/falcon")
    (tmp_path / "train.py").write_text(GOOD)
    words = ["search", "train.py", "--target", "cpu:2", *options]
    words += ["--storage", f"postgresql://me:kestrel/falcon@{place}"]
    arguments = ["--db", "postgresql://me:kestrel falcon@h/db", "--url=redis://:falcon@h"]
    cache = {"AUTOMESH_CACHE": str(tmp_path / "cache")}
    ran = bad_inputs_run.run(shlex.join([*words, "--", *arguments]), tmp_path, cache)
    assert ran.code == 0, ran.stderr
    texts: dict[str, str | bytes] = {**said_by("search", ran), **bad_inputs_run.contents(tmp_path)}
    assert any("/terms/" in name for name in texts)
    texts |= {f"row {number}": row for number, row in enumerate(rows_of(place))}
    (study,) = (tmp_path / "results").glob("train-cpu-2-*")
    for command in (
        f"show {study} --json",
        f"explain {study} dp:2",
        f"explain {study} dp:2 --json",
    ):
        ran = bad_inputs_run.run(shlex.join([*shlex.split(command), *words[-2:]]), tmp_path, cache)
        assert ran.code == 0, ran.stderr
        texts |= said_by(command, ran)
    assert leaks(texts) == []
    assert "-- --db 'postgresql://me:***@h/db' '--url=redis://:***@h'" in " ".join(
        json.loads(str(texts[f"stdout of show {study} --json"]))["command"].split()
    )


SPY = """\
import os, pathlib, sys, time
number = os.getpid()
for pid in (os.getpid(), os.getppid()):
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    pathlib.Path(f"seen-{number}-{pid}").write_bytes(words + b"\\n" + variables)
for step in range(100):
    print(f"took {sys.argv[1]} ms", flush=True)
"""


@pytest.mark.slow
def test_processes_of_a_search_do_not_get_the_password(server: str, tmp_path: Path) -> None:
    """A search as a process of its own: what it starts has the password in no word, no variable."""
    place = database_for(server, "processes", "kestrel/falcon")
    (tmp_path / "spy.py").write_text(SPY)
    command = [sys.executable, "-m", "automesh", "search", "--target", "cpu:2", "--top", "1"]
    command += ["--command", f"{shlex.quote(sys.executable)} spy.py {{tp}}", "--timed-steps", "2"]
    command += ["--step-time", "regex:took (?P<ms>[0-9.]+) ms"]
    command += ["--storage", f"postgresql://me@{place}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), PASSWORD: "kestrel/falcon"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    seen = list(tmp_path.glob("seen-*"))
    assert len(seen) >= 4
    assert any(b"guardian" in one.read_bytes() for one in seen)
    streams = {"stdout": done.stdout, "stderr": done.stderr}
    assert leaks(streams | bad_inputs_run.contents(tmp_path)) == []


# Where a text of somebody else's becomes ours.

SECRET = parse_storage("postgresql://me:kestrel %2Ffalcon@h/db", Path())
SPELLED = "kestrel /falcon, kestrel%20/falcon,\nkestrel+%2Ffalcon and kestrel%20%2Ffalcon"


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "kestrel /falcon"),
        psycopg.OperationalError("bad dsn: password='kestrel /falcon' host=h"),
        sa_errors.OperationalError("SELECT 1", {}, psycopg.OperationalError(SPELLED)),
        sa_errors.ArgumentError("Could not parse postgresql://me:kestrel /falcon@h/db"),
        optuna.exceptions.StorageInternalError("kestrel%20%2Ffalcon"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_database_are_masked(error: Exception) -> None:
    """The former version raised each of these with the password, and as the cause once more."""
    if isinstance(error, psycopg.Error):
        error = sa_errors.OperationalError("", {}, error)
    with pytest.raises(UsageError) as caught, explained(SECRET):
        if isinstance(error, optuna.exceptions.StorageInternalError):
            raise error from sa_errors.OperationalError("", {}, OSError("kestrel /falcon"))
        raise error
    assert "***" in caught.value.message and "\n" not in caught.value.message
    shown = traceback.TracebackException.from_exception(caught.value, lookup_lines=False)
    told = "".join(one for one in shown.format() if not one.lstrip().startswith("File "))
    assert leaks({"message": str(caught.value), "traceback": told}) == []


def test_a_cause_without_a_secret_is_kept() -> None:
    with pytest.raises(UsageError) as caught, explained(SECRET):
        raise sa_errors.OperationalError("SELECT 1", {}, OSError("connection refused"))
    assert isinstance(caught.value.__cause__, sa_errors.OperationalError)


@pytest.mark.parametrize(
    "command",
    [
        "search train.py --budget 'postgresql://me:kestrel falcon@h/db'",
        "search train.py --storage 'redis://:kestrel falcon@h'",
        "search train.py --storage 'host=h password=kestrel'",
        "search train.py --storage 'postgresql://me:kestrel@h/falcon@db'",
        "search train.py --storage 'postgresql://me:kestrel@h:port/db'",
        "search train.py --storage 'sqlite+pysqlcipher://:kestrel@/study.db'",
        "search train.py --storage 'postgresql:me:kestrel@h/falcon'",
        "search 'postgresql://me:kestrel/falcon@h/db'",
        "show 'postgresql://me:kestrel/falcon@h/db'",
        "search --command 'python train.py {fsdp --db postgresql://me:kestrel/falcon@h'",
        "search --command 'python train.py --db postgresql://me:kestrel/falcon@h'",
        "explain results dp:1 --storage 'postgresql://h:1/db?password=kestrel@falcon&a=b:c:d'",
    ],
)
def test_what_is_typed_wrongly_is_not_repeated_with_its_password(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("def build(mesh): ...\n")
    ran = bad_inputs_run.run(command, tmp_path)
    assert (ran.code, ran.stdout) == (2, "")
    assert "error: " in ran.stderr
    assert leaks(said_by("it", ran) | bad_inputs_run.contents(tmp_path)) == []


def test_what_to_type_after_ctrl_c_has_no_password() -> None:
    url = "postgresql://me:kestrel falcon@h/db"
    for words in (["search", "train.py", "--storage", url], ["show", f"--storage={url}"]):
        with mock.patch.object(sys, "argv", ["automesh", *words]):
            error = guard.interrupted()
        assert leaks({"hint": error.hint}) == []
        assert error.hint.endswith("postgresql://me@h/db")


@pytest.mark.slow
def test_a_request_and_a_storage_do_not_show_it(tmp_path: Path) -> None:
    url = "postgresql://me:kestrel@h/db?sslpassword=falcon"
    options = SearchOptions(command="python a.py {tp}", storage=url)
    storage = parse_storage(url, tmp_path, {PASSWORD: "kestrel"})
    shown = {
        "request": repr(read_request(None, options)),
        "storage": f"{storage!r} {storage.text} {storage.location}",
    }
    assert leaks(shown) == []
