"""The database of a service, and what else may lie in its place."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from automesh.errors import UsageError
from automesh_service.submissions.database import AUDIT, CUTS, TOKENS, Database
from automesh_service.submissions.tokens import Holder, Tokens


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(";".join(("BEGIN", *statements, "COMMIT")))


def ours(path: Path) -> None:
    Database(path).close()


def newer(path: Path) -> None:
    ours(path)
    sql(path, "ALTER TABLE tokens ADD COLUMN group_name VARCHAR")


def with_code(path: Path) -> None:
    ours(path)
    sql(path, "CREATE TRIGGER spy AFTER INSERT ON tokens BEGIN DELETE FROM audit; END")


def with_check(path: Path) -> None:
    ours(path)
    sql(path, "DROP TABLE cuts")
    sql(
        path,
        "CREATE TABLE cuts (number VARCHAR NOT NULL, count INTEGER NOT NULL "
        "CHECK(length(hex(zeroblob(9))) > 0), PRIMARY KEY (number))",
    )


def of_another_program(path: Path) -> None:
    sql(path, "CREATE TABLE tokens(a)")


def with_many_tables(path: Path) -> None:
    sql(path, *(f"CREATE TABLE t{number}(a)" for number in range(2000)))


def with_journal(path: Path) -> None:
    ours(path)
    Path(f"{path}-journal").write_bytes(b"x" * 1024)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    ours(path.parent / "elsewhere.db")
    path.symlink_to(path.parent / "elsewhere.db")


def folder(path: Path) -> None:
    path.mkdir()


def no_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def cut(path: Path) -> None:
    ours(path)
    path.write_bytes(path.read_bytes()[:5000])


FOREIGN: tuple[Callable[[Path], None], ...] = (
    *(newer, with_code, with_check, of_another_program, with_many_tables, with_journal, pipe),
    *(link, folder, no_database, cut),
)


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_what_is_not_ours_is_refused_and_left_as_it_is(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "service.db"
    make(path)
    before = {one.name: one.lstat().st_mtime_ns for one in tmp_path.iterdir()}
    with pytest.raises(UsageError) as caught:
        Database(path)
    assert "service.db` " in caught.value.message
    assert "--home" in caught.value.hint
    # SQLite makes a log and its index for whoever reads; what was there is as it was.
    after = {one.name: one.lstat().st_mtime_ns for one in tmp_path.iterdir()}
    assert {name: after.get(name) for name in before} == before


def test_the_journal_of_others_is_not_played_back(tmp_path: Path) -> None:
    """SQLite would delete the file that a hot journal names as its super-journal."""
    path, victim = tmp_path / "service.db", tmp_path / "victim"
    ours(path)
    victim.write_text("to be kept")
    Path(f"{path}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    with pytest.raises(UsageError, match="journal` is there, which the service never writes"):
        Database(path)
    assert Path(f"{path}-journal").exists() and victim.exists()


def test_a_former_version_had_fewer_tables(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    database = Database(path)
    token = Tokens(database).make("ann", "read", None)
    database.close()
    sql(path, "DROP TABLE cuts", "DROP TABLE leases", "DROP TRIGGER audit_DELETE")
    again = Database(path)
    assert isinstance(Tokens(again).check(token), Holder)
    with again.read() as connection:
        assert connection.execute(sa.select(CUTS)).all() == []
    with pytest.raises(IntegrityError), again.change() as connection:
        row = {"at_s": 0.0, "who": "", "address": "", "action": "", "subject": "", "said": ""}
        connection.execute(sa.insert(AUDIT).values(**row, status=0))
        connection.execute(sa.delete(AUDIT))
    again.close()


def test_an_empty_file_becomes_one_and_what_is_only_in_the_log_counts(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    path.touch()
    database = Database(path)
    with database.change() as connection:
        connection.execute(
            sa.insert(TOKENS).values(number="1", name="a", hash="b", scope="read", made_s=0.0)
        )
    # As after a kill: the log was not merged into the file.
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"copy.db{suffix}")
    database.close()
    copy = Database(tmp_path / "copy.db")
    with copy.read() as connection:
        assert connection.execute(sa.select(TOKENS.c.name)).scalar_one() == "a"
    copy.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_one_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    ours(path)
    path.chmod(0o400)
    with pytest.raises(UsageError, match="readonly"):
        Database(path)
