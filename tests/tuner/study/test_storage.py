"""Storages that cannot be used: one sentence and a hint each, and the file is left as it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.tuner.study.storage import Storage, parse_storage
from tests.support.samples.storage_cases import BACKENDS, compiled, opened, plans

pytest_plugins = ("tests.support.storage_fixtures",)
KEPT = "it is never overwritten: move it away to start over, or name another --storage"


def refusal(storage: Storage) -> UsageError:
    with pytest.raises(UsageError) as caught:
        opened(storage).close()
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def sqlite_file(folder: Path) -> Path:
    with opened(parse_storage("", folder)) as study:
        study.lead()
        study.compile.enqueue(plans(40))
    return folder / "study.db"


def journal_file(folder: Path) -> Path:
    with opened(parse_storage(f"{folder}/a.journal", folder)) as study:
        study.lead()
        study.compile.enqueue(plans(2))
    return folder / "a.journal"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"these are my notes", "is not a SQLite database"),
        (b"SQLite format 3\x00", "is damaged: file is not a database"),
        (b"SQLite format 3\x00" + b"\xff" * 9000, "is damaged: file is not a database"),
    ],
)
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "study.db"
    path.write_bytes(content)
    error = refusal(parse_storage("", tmp_path))
    assert message in error.message
    assert str(path) in error.message
    assert error.hint == KEPT
    assert path.read_bytes() == content


def test_a_database_with_a_broken_page(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path)
    content = bytearray(path.read_bytes())
    page = int.from_bytes(content[16:18], "big")
    content[5 * page : 25 * page] = os.urandom(20 * page)
    path.write_bytes(content)
    error = refusal(parse_storage("", tmp_path))
    assert "is damaged: " in error.message
    assert error.hint == KEPT
    assert path.read_bytes() == content


def test_a_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE trials (x)")
    connection.execute("CREATE TABLE version_info (y)")
    connection.commit()
    connection.close()
    words = "has `x` in the table `trials`, which automesh did not create"
    assert words in refusal(parse_storage("", tmp_path)).message


@pytest.mark.parametrize(
    ("version", "words", "hint"),
    [
        ("v3.0.0.a", "by an older Optuna", "optuna storage upgrade --storage"),
        ("v99.0.0.a", "by a newer Optuna", "pip install -U optuna"),
    ],
)
def test_another_schema_of_optuna(tmp_path: Path, version: str, words: str, hint: str) -> None:
    connection = sqlite3.connect(sqlite_file(tmp_path))
    connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
    connection.commit()
    connection.close()
    error = refusal(parse_storage("", tmp_path))
    assert words in error.message
    assert hint in error.hint


@pytest.mark.parametrize("kind", BACKENDS[:2], indirect=True)
def test_a_study_of_a_newer_automesh(storage: Storage) -> None:
    with opened(storage) as study:
        study.compile.optuna_study.set_user_attr("automesh_schema", 99)
    assert "was made by a newer automesh" in refusal(storage).message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a line\nanother\n", "is not an Optuna journal"),
        (b"just some words, no line end", "is not an Optuna journal"),
        (b"[1, 2]\n", "is not an Optuna journal"),
    ],
)
def test_a_file_that_is_no_journal(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    error = refusal(parse_storage(str(path), tmp_path))
    assert message in error.message
    assert error.hint == KEPT
    assert path.read_bytes() == content


def test_a_journal_with_a_broken_line(tmp_path: Path) -> None:
    path = journal_file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:10] + b"\n"
    path.write_bytes(b"".join(lines))
    assert "is damaged at line 3" in refusal(parse_storage(str(path), tmp_path)).message
    assert path.read_bytes() == b"".join(lines)


def test_a_damaged_file_of_holds(tmp_path: Path) -> None:
    path = journal_file(tmp_path)
    storage = parse_storage(str(path), tmp_path)
    holds = path.with_name("a.journal.holds")
    holds.write_bytes(b"")
    opened(storage).close()
    for content in (b"[{]", b"{}", b"[" * 100_000, b"\xff\xfe"):
        holds.write_bytes(content)
        study = opened(storage)
        with pytest.raises(UsageError, match="is damaged") as caught:
            study.lead()
        assert caught.value.hint.startswith("delete it while no search runs")
        assert holds.read_bytes() == content
        with pytest.raises(UsageError):
            study.close()


def test_a_damaged_hold_does_not_block_the_others(tmp_path: Path) -> None:
    path = journal_file(tmp_path)
    storage = parse_storage(str(path), tmp_path)
    holds = path.with_name("a.journal.holds")
    with opened(storage) as first:
        assert first.lead()
        rows = json.loads(holds.read_bytes())
        holds.write_text(json.dumps([{"key": 1}, *rows, "nothing"]))
        with opened(storage) as second:
            assert not second.lead()
            assert list(second.skipped.named) == [
                "hold 1 of `a.journal.holds`",
                "hold 3 of `a.journal.holds`",
            ]
        assert first.heartbeat()
        assert json.loads(holds.read_bytes())[0]["key"] == rows[0]["key"]


def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    path = journal_file(tmp_path)
    whole = path.read_bytes()
    record = json.dumps({"op_code": 2, "worker_id": "w", "study_id": 0, "user_attr": {"a": 1}})
    for length in range(1, len(record) + 1, 7):
        path.write_bytes(whole + record[:length].replace(": ", ":").encode())
        with opened(parse_storage(str(path), tmp_path)) as study:
            assert len(study.compile.trials()) == 2
            trial = study.compile.claim()
            study.compile.finish(trial, compiled(0.5))
        with opened(parse_storage(str(path), tmp_path)) as study:
            assert [one.state for one in study.compile.trials()] == ["done", "waiting"]


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "study.db").mkdir()
    assert refusal(parse_storage("", tmp_path)).message.endswith("is a folder, not a file")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("mine")
    error = refusal(parse_storage("", tmp_path / "results"))
    assert "cannot be made: " in error.message
    assert (tmp_path / "results").read_text() == "mine"


def _refused_as_nobody(storage: Storage, other: Storage, answers: Any) -> None:
    opened(other).close()  # imports everything, which nobody else may be allowed to
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write everywhere
    try:
        opened(storage).close()
        answers.put("it opened")
    except UsageError as error:
        answers.put(str(error))


@pytest.fixture
def open_folder() -> Generator[Path]:
    """A folder that every user may enter, which is not so below pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("what", ["folder", "file", "unreadable"])
def test_read_only(what: str, open_folder: Path) -> None:
    folder = open_folder / "results"
    folder.mkdir()
    path = sqlite_file(folder)
    folder.chmod({"folder": 0o555, "file": 0o777, "unreadable": 0o000}[what])
    path.chmod(0o444)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (parse_storage("", folder), parse_storage("", folder.parent / "own"), answers)
    process = context.Process(target=_refused_as_nobody, args=arguments)
    process.start()
    answer = answers.get(timeout=60)
    process.join()
    folder.chmod(0o755)
    assert "may not be read and written\nhint: change its permissions" in answer


def test_a_server_that_does_not_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        url = f"postgresql://me:secret@127.0.0.1:{port}/db"
        error = refusal(parse_storage(url, tmp_path))
    assert f"postgresql+psycopg://me:***@127.0.0.1:{port}/db cannot be reached: " in error.message
    assert "secret" not in str(error)


def test_a_database_that_does_not_exist(postgres_url: str, tmp_path: Path) -> None:
    url = f"{postgres_url.rpartition('/')[0]}/none"
    assert 'database "none" does not exist' in refusal(parse_storage(url, tmp_path)).message


@pytest.mark.parametrize(
    ("url", "module", "hint"),
    [
        ("postgres://h/d", "psycopg", "pip install 'jax-automesh[postgres]'"),
        ("mysql+pymysql://h/d", "pymysql", "pip install pymysql"),
        ("postgresql+nothing://h/d", "nothing", "pip install 'jax-automesh[postgres]'"),
    ],
)
def test_a_driver_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, module: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = refusal(parse_storage(url, tmp_path))
    assert "the driver for " in error.message
    assert "is not installed" in error.message
    assert hint in error.hint


def test_a_bad_port(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a database URL"):
        parse_storage("postgresql://host:port/db", tmp_path)


@pytest.mark.parametrize("kind", BACKENDS, indirect=True)
def test_a_storage_that_fails_later(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(storage)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    study.lead()
    with monkeypatch.context() as disk:
        disk.setattr(study._backend.optuna, "create_new_trial", full)
        with pytest.raises(UsageError, match=r"failed: .*No space left on device") as caught:
            study.compile.enqueue(plans(1))
    assert "run the same command again" in caught.value.hint
    study.close()


def test_braces_and_other_signs_in_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a {b} %c #d ?e"
    names: list[Callable[[], Path]] = [lambda: sqlite_file(folder), lambda: journal_file(folder)]
    for make in names:
        assert make().exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a {b} %c #d ?e"]
