"""SQLite files that another account, an agent or a bundle may have written: nothing is run."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from automesh import limits
from automesh.errors import UsageError
from automesh.foreign.sqlite import Bounded, StatementsTooSlow, connect, copied
from automesh.tuner.study import backend as backends
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.stored.schema import TABLES
from automesh.tuner.study.study import Study, open_study
from tests.support.hot_journal import plant_journal
from tests.support.samples.storage_cases import opened, plans

NAME = "lm-cpu-8-1234"
NOBODY = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to others")
Change = Callable[[Path, Path], object]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a study, with a note and two plans that wait."""
    place = tmp_path / "results" / NAME
    with opened(parse_storage("", place)) as study:
        study.lead()
        study.compile.enqueue(plans(2))
        study.note("header", "sound")
    return place


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    return path


def database(folder: Path) -> Path:
    return folder / "study.db"


def storage(folder: Path) -> Storage:
    return parse_storage("", folder)


def noted(folder: Path) -> object:
    """What who only reads finds in the study."""
    with open_study(storage(folder), NAME, create=False) as study:
        assert len(study.compile.trials()) == 2
        return study.noted("header")


def refused(folder: Path) -> UsageError:
    """Why no search is started on the study; nothing of it is changed."""
    before = {one: one.read_bytes() for one in folder.iterdir() if one.suffix != ".flock"}
    with pytest.raises(UsageError) as caught:
        opened(storage(folder))
    assert "\n" not in caught.value.message
    assert caught.value.hint
    after = {one: one.read_bytes() for one in folder.iterdir() if one.suffix != ".flock"}
    assert after == before
    return caught.value


def cut_off(study: Study) -> None:
    """Ends a search as SIGKILL would."""
    study._backend.close()  # pyright: ignore[reportPrivateUsage]


# What lies beside the file


def test_a_journal_of_others_is_played_back_by_nobody(folder: Path, victim: Path) -> None:
    """Before, SQLite deleted the file that the journal names, for who searched and who read."""
    journal = plant_journal(database(folder), victim)
    assert noted(folder) == "sound"
    error = refused(folder)
    assert "lies beside it, which no study has" in error.message
    assert victim.read_text() == "precious"
    assert journal.exists()


def test_the_planted_journal_is_one_that_sqlite_obeys(folder: Path, victim: Path) -> None:
    plant_journal(database(folder), victim)
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("SELECT * FROM studies").fetchall()
    assert not victim.exists()


def test_a_search_where_others_may_write_is_safe_at_every_moment(
    folder: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody plants the journal after everything was looked at."""
    folder.chmod(0o777)
    own = backends.own

    def planting(path: Path) -> Callable[[], sqlite3.Connection]:
        plant_journal(database(folder), victim)
        return own(path)

    monkeypatch.setattr(backends, "own", planting)
    with opened(storage(folder)) as study:
        assert study.noted("header") == "sound"
        study.note("header", "searched")
    assert noted(folder) == "searched"
    assert victim.exists()


def test_a_search_where_others_may_write_goes_on_after_a_kill(folder: Path) -> None:
    folder.chmod(0o777)
    study = opened(storage(folder))
    study.note("header", "first")
    study.note("header", "second")  # Within the seconds in which nothing is written.
    cut_off(study)
    assert noted(folder) == "first"
    with opened(storage(folder)) as again:
        assert again.noted("header") == "second"
    assert noted(folder) == "second"
    # Nobody else may write there any more: it is searched in its place again.
    study = opened(storage(folder))
    study.note("header", "third")
    study.note("header", "fourth")
    cut_off(study)
    folder.chmod(0o755)
    with opened(storage(folder)) as again:
        assert again.noted("header") == "fourth"


def test_what_somebody_has_put_back_counts_and_is_never_overwritten(folder: Path) -> None:
    folder.chmod(0o777)
    saved = database(folder).read_bytes()
    with opened(storage(folder)) as study:
        study.note("header", "searched")
    database(folder).write_bytes(saved)  # As from another host, or from a backup.
    with opened(storage(folder)) as study:
        assert study.noted("header") == "sound"
        database(folder).write_bytes(saved + bytes(4096))
        with pytest.raises(UsageError, match="was changed by somebody else"):
            study.note("header", "other")
        database(folder).write_bytes(saved)
        database(folder).unlink()
    assert noted(folder) == "other"  # What was only removed is written again.
    with opened(storage(folder)) as study, opened(storage(folder)) as colleague:
        assert colleague.noted("header") == "other"
        assert study.lead() and not colleague.lead()
    database(folder).unlink()
    with opened(storage(folder)) as study:  # Started over.
        assert study.noted("header") is None


def test_what_was_only_in_the_log_is_kept_where_others_may_write(folder: Path) -> None:
    """A former version was killed there: what it had found last is in the log alone."""
    study = opened(storage(folder))
    study.note("header", "published")
    study.note("header", "in the log")
    kept = {one: one.read_bytes() for one in folder.glob("study.db*") if one.suffix != ".flock"}
    study.close()
    for path, content in kept.items():
        path.write_bytes(content)
    folder.chmod(0o777)
    assert noted(folder) == "in the log"
    with opened(storage(folder)) as again:
        assert again.noted("header") == "in the log"
        assert not (folder / "study.db-wal").exists()
    assert noted(folder) == "in the log"


@is_root
def test_a_study_of_another_account_is_read_and_not_written(folder: Path, victim: Path) -> None:
    os.chown(database(folder), NOBODY, NOBODY)
    assert noted(folder) == "sound"
    assert "belongs to another account" in refused(folder).message
    plant_journal(database(folder), victim)
    assert noted(folder) == "sound"
    assert victim.exists()


@is_root
@pytest.mark.parametrize("name", ["study.db-wal", "study.db-shm"])
@pytest.mark.parametrize("content", [b"", b"\x37\x7f\x06\x82" * 9000, b"x" * 100])
def test_a_log_and_shared_memory_of_others_are_not_looked_at(
    folder: Path, name: str, content: bytes
) -> None:
    path = folder / name
    path.write_bytes(content)
    os.chown(path, NOBODY, NOBODY)
    assert noted(folder) == "sound"
    with opened(storage(folder)) as study:  # In a place of its own.
        assert study.noted("header") == "sound"
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, 32_768, 32_769, 2**20])
def test_shared_memory_of_another_size(folder: Path, size: int) -> None:
    (folder / "study.db-shm").write_bytes(os.urandom(size))
    assert noted(folder) == "sound"
    with opened(storage(folder)) as study:
        assert study.noted("header") == "sound"


def test_a_link_in_the_place_of_a_study_is_not_written(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "results" / "other"
    other.mkdir()
    (other / "study.db").symlink_to(database(folder))
    before = database(folder).read_bytes()
    assert "is a link" in refused(other).message
    assert database(folder).read_bytes() == before


def test_no_journal_is_ever_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed while a study is made would leave one behind, and be refused ever after."""
    place = tmp_path / "results" / NAME
    seen = list[str]()
    opener = sqlite3.connect

    def looking(path: object, *arguments: object, **named: object) -> sqlite3.Connection:
        connection = opener(path, *arguments, **named)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if str(place) in str(path):
            connection.set_authorizer(
                lambda *_: seen.extend(one.name for one in place.glob("*-journal")) or 0
            )
        return connection

    monkeypatch.setattr(sqlite3, "connect", looking)
    for _ in range(2):
        with opened(storage(place)) as study:
            study.note("header", 1)
        with closing(opener(database(place))) as connection:  # As a former state was packed.
            connection.execute("PRAGMA journal_mode=DELETE")
    assert seen == []


# What stands in the file

SLOW = "length(hex(replace(hex(zeroblob(x)),'0','01')))"
SCHEMAS = {
    "a table with a CHECK": f"CREATE TABLE zz (x CHECK ({SLOW} > 0))",
    "a column with a CHECK": "ALTER TABLE trials ADD COLUMN x INTEGER CHECK (x IS NULL)",
    "a generated column": "ALTER TABLE trials ADD COLUMN x INTEGER AS (abs(number)) VIRTUAL",
    "an unknown column": "ALTER TABLE trials ADD COLUMN x INTEGER",
    "a default that is computed": "CREATE TABLE studies2 (x DEFAULT (abs(-1)))",
    "an index on an expression": "CREATE INDEX ii ON trials (abs(number))",
    "a partial index": "CREATE INDEX ii ON trials (number) WHERE abs(number) > 1",
    "an index with a collation": "CREATE INDEX ii ON trials (state COLLATE NOCASE)",
    "a view": "CREATE VIEW vv AS SELECT 1",
    "a trigger": "CREATE TRIGGER tt AFTER INSERT ON trials BEGIN DELETE FROM studies; END",
    "a virtual table": "CREATE VIRTUAL TABLE ff USING fts5(x)",
    "a table without row numbers": "CREATE TABLE ww (x PRIMARY KEY) WITHOUT ROWID",
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_is_no_part_of_a_study(folder: Path, name: str, is_in_place: bool) -> None:
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute(SCHEMAS[name])
        connection.commit()
    folder.chmod(0o755 if is_in_place else 0o777)
    for read in (lambda: noted(folder), lambda: opened(storage(folder))):
        with pytest.raises(UsageError, match="which automesh did not create") as caught:
            read()
        assert "\n" not in caught.value.message


def test_a_slow_check_is_not_evaluated(folder: Path) -> None:
    """Before, `show` hung for minutes in `PRAGMA quick_check`, and was deaf to Ctrl-C."""
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute(SCHEMAS["a table with a CHECK"])
        connection.executemany("INSERT INTO zz VALUES (?)", [(20_000_000,)] * 50)
        connection.commit()
    begun_s = time.monotonic()
    with pytest.raises(UsageError, match="has the table `zz`"):
        noted(folder)
    assert time.monotonic() - begun_s < 60


def test_what_sqlite_master_says_is_not_believed(folder: Path) -> None:
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("CREATE TABLE zz (x CHECK (abs(x) > 0))")
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute(
            "UPDATE sqlite_master SET name = 'alembic_version', tbl_name = 'alembic_version' "
            "WHERE name = 'zz'"
        )
        connection.commit()
    with pytest.raises(UsageError):
        noted(folder)


def another_program(path: Path, tables: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for number in range(tables):
            connection.execute(f"CREATE TABLE t{number} (x)")
        connection.execute("COMMIT")


def ten_thousand_tables(folder: Path, _: Path) -> None:
    another_program(database(folder), 10_000)


def another_programs(folder: Path, _: Path) -> None:
    database(folder).unlink()
    another_program(database(folder), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_programs, "is a database of another program"),
        (ten_thousand_tables, "has more than 100 tables"),
    ],
)
def test_a_database_of_another_program(
    folder: Path, tmp_path: Path, change: Change, words: str
) -> None:
    change(folder, tmp_path)
    begun_s = time.monotonic()
    with pytest.raises(UsageError, match=words):
        noted(folder)
    assert words in refused(folder).message
    assert time.monotonic() - begun_s < 20


def test_a_study_whose_tables_are_not_all_there_is_only_read(folder: Path) -> None:
    """Optuna would make them, which cannot be done in a copy."""
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("DROP TABLE trial_params")
        connection.commit()
    folder.chmod(0o777)
    with pytest.raises(
        UsageError, match="it lacks what a search writes first, and it is only read here"
    ):
        noted(folder)


def test_pages_of_64_kib(folder: Path) -> None:
    with closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA page_size=65536")
        connection.execute("VACUUM")
    for mode in (0o755, 0o777):
        folder.chmod(mode)
        assert noted(folder) == "sound"
        with opened(storage(folder)) as study:
            assert study.noted("header") == "sound"


@pytest.mark.parametrize("name", ["a?mode=rwc&x#.db", "a b%41.db", "file:x.db", "temp.db"])
def test_names_that_mean_something_to_sqlite(folder: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.write_bytes(database(folder).read_bytes())
    before = {one.name for one in tmp_path.iterdir()}
    with open_study(
        Storage(kind="sqlite", location=str(place)), NAME, create=False, in_place=False
    ) as study:
        assert study.noted("header") == "sound"
    assert {one.name for one in tmp_path.iterdir()} == before


def test_a_copy_attaches_no_other_file(folder: Path, tmp_path: Path) -> None:
    copy = copied(database(folder), _made(tmp_path / "mine"), limit_bytes=2**30)
    with closing(connect(copy)) as connection:
        for sql in (
            f"ATTACH '{tmp_path}/new.db' AS other",
            "INSERT INTO studies VALUES (99, 'x')",
            "CREATE TABLE x (y)",
        ):
            with pytest.raises(sqlite3.Error):
                connection.execute(sql)
    assert not (tmp_path / "new.db").exists()


def test_the_tables_are_those_of_the_installed_optuna(folder: Path) -> None:
    """A new column of Optuna's must be added, for services, which look at studies without it."""
    with closing(sqlite3.connect(database(folder))) as connection:
        made = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        tables = {one for one in made if not one.startswith(("sqlite_", "ix_"))}
        assert tables == set(TABLES)
        for table in tables:
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            assert columns <= TABLES[table]


# Bounds


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"


def test_statements_end_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "_left_s", 0.2)
    with closing(sqlite3.connect(":memory:", factory=Bounded)) as connection:
        begun_s = time.monotonic()
        with pytest.raises(StatementsTooSlow, match="takes longer than"):
            connection.execute(ENDLESS).fetchall()
        assert time.monotonic() - begun_s < 60
        # All of them together: a thousand that are a little slow do not take longer.
        with pytest.raises(StatementsTooSlow):
            connection.execute(ENDLESS).fetchall()
        assert time.monotonic() - begun_s < 60


def test_ctrl_c_ends_a_statement() -> None:
    with closing(sqlite3.connect(":memory:", factory=Bounded)) as connection:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            connection.execute(ENDLESS).fetchall()
        timer.join()
        assert connection.execute("SELECT 1").fetchall() == [(1,)]


def test_a_database_without_an_end_is_not_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FOREIGN_DATABASE_BYTES", 2**12)
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="holds more than 4"):
        noted(folder)


def test_a_copy_is_of_one_moment_while_others_write(folder: Path, tmp_path: Path) -> None:
    """Two rows change together, and the log begins anew all the time."""
    path = tmp_path / "busy.db"
    mine = _made(tmp_path / "mine")
    is_over = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            number = 0
            while not is_over.is_set():
                number += 1
                writer.execute("BEGIN IMMEDIATE")
                writer.execute("UPDATE one SET x = ?", (number,))
                writer.execute("UPDATE other SET x = ?, y = randomblob(40000)", (number,))
                writer.execute("COMMIT")
                if number % 7 == 0:
                    writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
                time.sleep(0.001)

    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.executescript(
            "CREATE TABLE one (x); CREATE TABLE other (x, y);"
            "INSERT INTO one VALUES (0); INSERT INTO other VALUES (0, '')"
        )
        thread = threading.Thread(target=write)
        thread.start()
        seen = set[int]()
        try:
            for _ in range(30):
                copy = copied(path, mine, limit_bytes=2**30, with_log=True)
                with closing(connect(copy)) as connection:
                    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                    (one,) = connection.execute("SELECT x FROM one").fetchone()
                    (other,) = connection.execute("SELECT x FROM other").fetchone()
                assert one == other
                seen.add(one)
        finally:
            is_over.set()
            thread.join()
    assert len(seen) > 5


def test_what_is_found_is_seen_in_the_file_alone(folder: Path, tmp_path: Path) -> None:
    """Other accounts, who read no log, see the header at once, and all of it at the end."""
    place = tmp_path / "results" / "other"
    mine = _made(tmp_path / "mine")
    with opened(storage(place)) as study:
        study.note("header", 1)
        with open_study(_alone(place, mine), NAME, create=False) as reader:
            assert reader.noted("header") == 1
        with opened(storage(place)):  # Somebody else has it open: the log stays.
            study.note("footer", 2)
            study.close()
            with open_study(_alone(place, mine), NAME, create=False) as reader:
                assert reader.noted("footer") == 2


def _alone(place: Path, folder: Path) -> Storage:
    (folder / "study.db").write_bytes(database(place).read_bytes())
    return Storage(kind="sqlite", location=str(folder / "study.db"))
