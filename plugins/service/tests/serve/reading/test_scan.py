"""What a look at the studies reads, and how much it asks of a database."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from automesh.outcomes import Failed
from automesh.tuner.study import lease
from automesh.tuner.study.backend import open_backend
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.study import Study, open_study, parse_storage
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.reading import messages, process, read, scan
from automesh_service.serve.reading.messages import to_message
from automesh_service.serve.reading.read import Found, StudyReader
from automesh_service.serve.reading.scan import Reading, RememberedStudy, Scan
from plugins.service.tests.support.service import make_estimated, make_measured
from tests.support.postgres import new_database
from tests.support.samples import explain_samples as samples
from tests.support.storage_fixtures import postgres_url as postgres_url
from tests.tuner.explain.test_study import VERSIONS, header

NAME = "train-gpu-h100-16-running"
MOST_STATEMENTS = 20
"""Of a look at a study that is searched. Without them 59 statements were needed, and three
connections."""


class Inline:
    """Reads studies at once, in this process."""

    def __init__(self, storage: str) -> None:
        self.reader = StudyReader(storage)
        self._ended: list[Reading] = []
        self.begun: list[tuple[str, bool]] = []

    def has_room(self) -> bool:
        return True

    def begin(self, name: str, found: Found, *, is_slow: bool, failures: int) -> None:
        self.begun.append((name, is_slow))
        said = to_message(self.reader.read(name, found))
        self._ended.append(Reading(name=name, took_s=0.1, said=said))

    def ended(self, limit_s: float) -> Reading | None:
        return self._ended.pop(0) if self._ended else None


@contextmanager
def scanning(storage: str, seen: dict[str, RememberedStudy] | None = None) -> Generator[Scan]:
    readings = Inline(storage)
    with (
        closing(Scan(storage, pause_s=0, seen=seen or {}, readings=readings)) as one,
        closing(readings.reader),
    ):
        yield one


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads all that it may, also on a machine that does something else as well."""
    monkeypatch.setattr(scan, "LOOK_S", math.inf)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "all.db")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def kept(storage: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage that is kept open between two looks, with its searches: a server's, or a file that
    is treated as one."""
    if request.param == "postgres":
        return new_database(request.getfixturevalue("postgres_url"))
    monkeypatch.setattr(read, "_KEPT_OPEN", ("sqlite",))
    monkeypatch.setattr(scan, "_sign_of", lambda _: None)
    monkeypatch.setattr(scan, "open_backend", lambda place, **_: open_backend(place))
    return storage


def note(study: Study, results: Path) -> None:
    book = Notebook(study=study, source_hash="abc", versions=VERSIONS)
    book.note_header(header(results / NAME))


@contextmanager
def searched(results: Path, storage: str) -> Generator[Study]:
    """A study of which this process is the search."""
    place = parse_storage(storage, results / NAME)
    with open_study(place, NAME, source_hash="abc", versions=VERSIONS) as study:
        assert study.lead()
        note(study, results)
        study.compile.enqueue([samples.plan("fsdp:4,tp:4", remat=one) for one in ("full", "none")])
        yield study


def looked(one: Scan, results: Path, **options: Any) -> dict[str, Any]:
    """A look; what it said of the studies that it has read, by name."""
    said = list(one.look([results], most=20, **options))
    assert said[-1] == {"is_behind": False}
    return {message["study"]["name"]: message["study"] for message in said if "study" in message}


@contextmanager
def statements() -> Generator[list[str]]:
    """What SQLAlchemy executes while inside, and `CONNECT` for each connection."""
    found: list[str] = []

    def on_execute(*arguments: Any) -> None:
        found.append(str(arguments[2]))

    def on_connect(*_: Any) -> None:
        found.append("CONNECT")

    event.listen(sa.Engine, "before_cursor_execute", on_execute)
    event.listen(sa.pool.Pool, "connect", on_connect)
    try:
        yield found
    finally:
        event.remove(sa.Engine, "before_cursor_execute", on_execute)
        event.remove(sa.pool.Pool, "connect", on_connect)


def test_a_look_at_a_search_asks_little_and_changes_nothing(tmp_path: Path, kept: str) -> None:
    results = tmp_path / "results"
    make_measured(results / "train-gpu-h100-16-ended", storage=kept)
    with searched(results, kept) as study, scanning(kept) as one:
        assert '"running"' in looked(one, results)[NAME]["text"]
        with statements() as found:
            again = looked(one, results)
        assert list(again) == [NAME]
        assert len(found) <= MOST_STATEMENTS, found
        assert "CONNECT" not in found
        changes = [text for text in found if not text.lstrip().startswith("SELECT")]
        assert changes == []
        # What comes to an end meanwhile is seen all the same.
        trial = study.compile.claim()
        assert trial is not None
        study.compile.finish(trial, Failed(stage="compile", reason="as an example"))
        assert '"failed": 1' in looked(one, results)[NAME]["text"]


def test_whether_studies_have_changed_is_two_statements(tmp_path: Path, kept: str) -> None:
    results = tmp_path / "results"
    for number in range(3):
        make_measured(results / f"train-gpu-h100-16-{number}", storage=kept)
    with scanning(kept) as one:
        assert len(looked(one, results)) == 3
        with statements() as found:
            assert looked(one, results) == {}
        assert len(found) == 2, found


def test_a_search_elsewhere_that_has_died_is_not_shown_for_ever(
    tmp_path: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a process on another host lives is told by how long it was silent, over many
    looks."""
    results = tmp_path / "results"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lease, "_machine", lambda: "another one")
        place = parse_storage(kept, results / NAME)
        dead = open_study(place, NAME, source_hash="abc", versions=VERSIONS)
        assert dead.lead()
        note(dead, results)
    clock = lease.monotonic
    with dead, scanning(kept) as one:
        assert '"running"' in looked(one, results)[NAME]["text"]
        assert '"running"' in looked(one, results)[NAME]["text"]
        monkeypatch.setattr(lease, "monotonic", lambda: clock() + lease.LEASE_S + 1)
        assert '"stopped"' in looked(one, results)[NAME]["text"]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def test_a_study_that_is_made_anew_is_read_anew(
    kind: str, tmp_path: Path, storage: str, request: pytest.FixtureRequest
) -> None:
    if kind == "postgres":
        storage = new_database(request.getfixturevalue("postgres_url"))
    results = tmp_path / "results"
    place = parse_storage(storage, results / NAME)
    with scanning(storage) as one, searched(results, storage) as study:
        trial = study.compile.claim()
        assert trial is not None
        study.compile.finish(trial, Failed(stage="compile", reason="as an example"))
        assert '"failed": 1' in looked(one, results)[NAME]["text"]
        with closing(open_backend(place)) as backend:
            for rung in ("compile", "measure"):
                number = backend.optuna.get_study_id_from_name(f"{NAME}/{rung}")
                backend.optuna.delete_study(number)
        # Where numbers are given again, it gets those of the former one.
        make_measured(results / "train-gpu-h100-16-other", storage=storage)
        with open_study(place, NAME, source_hash="abc", versions=VERSIONS) as other:
            note(other, results)
        found = looked(one, results)[NAME]["text"]
        assert '"problem": ""' in found
        assert '"failed": 0' in found


def test_what_the_server_knows_is_not_read_again(tmp_path: Path) -> None:
    for number in range(2):
        make_measured(tmp_path / f"train-gpu-h100-16-{number}")
    first = looked(Scan("", pause_s=0, seen={}, readings=Inline("")), tmp_path)
    known = {name: RememberedStudy(stamp=str(one["stamp"])) for name, one in first.items()}
    later = Scan("", pause_s=0, seen=known, readings=Inline(""))
    said = list(later.look([tmp_path], most=20))
    assert said == [{"new": [], "gone": []}, {"is_behind": False}]
    make_measured(tmp_path / "train-gpu-h100-16-1", step_s=0.125)
    assert list(looked(later, tmp_path)) == ["train-gpu-h100-16-1"]
    running = {
        name: RememberedStudy(stamp=one.stamp, is_running=True) for name, one in known.items()
    }
    assert len(looked(Scan("", pause_s=0, seen=running, readings=Inline("")), tmp_path)) == 2


class Slow:
    """Lets each reading end when the test says so; `clock` is that of the scan."""

    def __init__(self, room: int = 3) -> None:
        self.room = room
        self.begun: list[tuple[str, bool]] = []
        self.over: list[Reading] = []
        self.now_s = 1000.0

    def has_room(self) -> bool:
        return self.room > 0

    def begin(self, name: str, found: Found, *, is_slow: bool, failures: int) -> None:
        self.room -= not is_slow
        self.begun.append((name, is_slow))

    def end(self, name: str, *, is_slow: bool = False, said: Any = None) -> None:
        self.room += not is_slow
        self.over.append(Reading(name=name, took_s=9.0, said=said, reason="it took for ever"))

    def ended(self, limit_s: float) -> Reading | None:
        self.now_s += limit_s
        return self.over.pop(0) if self.over else None


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(scan, "LOOK_S", 10.0)
    found = Slow()
    monkeypatch.setattr(scan, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def look(one: Scan, *roots: Path) -> list[dict[str, Any]]:
    return list(one.look(roots, most=20))


def test_studies_that_take_for_ever_keep_no_other_from_being_read(
    slow: Slow, tmp_path: Path
) -> None:
    names = [f"train-gpu-h100-16-{number}" for number in range(5)]
    for name in names:
        make_estimated(tmp_path / name)
    one = Scan("", pause_s=0, seen={}, readings=slow)
    assert look(one, tmp_path)[-1] == {"is_behind": True}  # It waits no longer than it may.
    assert len(slow.begun) == 3 and not any(is_slow for _, is_slow in slow.begun)
    stuck = [name for name, _ in slow.begun]
    for name in stuck:
        slow.end(name)
    look(one, tmp_path)
    later = [(name, name in stuck) for name in names]
    assert sorted(slow.begun[3:]) == later  # Each beside the others, those that took long apart.
    slow.end(stuck[0], is_slow=True)
    said = [message["study"] for message in look(one, tmp_path) if "study" in message]
    assert [study["name"] for study in said] == [stuck[0]]
    assert "it took for ever" in said[0]["missing"] and '"unreadable"' in said[0]["text"]
    count = len(slow.begun)
    os.utime(tmp_path / stuck[0] / "study.db")  # Whoever changes it gains nothing.
    look(one, tmp_path)
    assert len(slow.begun) == count
    slow.now_s += scan.STUCK_AGAIN_S
    look(one, tmp_path)
    assert slow.begun[count:] == [(stuck[0], True)]
    slow.end(stuck[0], is_slow=True)
    look(one, tmp_path)
    slow.now_s += scan.STUCK_AGAIN_S  # The next time later.
    look(one, tmp_path)
    assert len(slow.begun) == count + 1


def test_who_fills_a_folder_keeps_the_others_waiting_once(slow: Slow, tmp_path: Path) -> None:
    mine, full = tmp_path / "mine", tmp_path / "full"
    for number in range(9):
        make_estimated(full / f"stuck-{number}")
    make_estimated(mine / "train-gpu-h100-16-0")
    os.utime(mine / "train-gpu-h100-16-0" / "study.db", (1e9, 1e9))  # the oldest of all
    look(Scan("", pause_s=0, seen={}, readings=slow), full, mine)
    assert ("train-gpu-h100-16-0", False) in slow.begun[:2]


def test_what_is_gone_while_it_is_read_is_not_told_of(slow: Slow, tmp_path: Path) -> None:
    folder = make_estimated(tmp_path / "train-gpu-h100-16-0")
    one = Scan("", pause_s=0, seen={}, readings=slow)
    look(one, tmp_path)
    (folder / "study.db").unlink()
    slow.end(folder.name)
    assert look(one, tmp_path) == [{"new": [], "gone": [folder.name]}, {"is_behind": False}]


def test_a_look_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        make_estimated(tmp_path / f"train-gpu-h100-16-{number}")
    one = Scan("", pause_s=0, seen={}, readings=Inline(""))
    reads: list[str] = []
    for is_behind in (True, True, False):
        *said, last = one.look([tmp_path], most=1)
        reads += [str(message["study"]["name"]) for message in said if "study" in message]
        assert last == {"is_behind": is_behind}
    assert len(set(reads)) == len(reads) == 3


def test_who_keeps_a_lock_keeps_no_other_study_from_being_read(tmp_path: Path) -> None:
    quick, slow = "train-gpu-h100-16-1", "train-gpu-h100-16-2"
    for name in (quick, slow):
        make_measured(tmp_path / name)
        os.utime(tmp_path / name / "study.db", (1e9, 1e9 + (name == slow)))
    for took_s, order in ((scan.SLOW_S, [slow, quick]), (scan.SLOW_S + 1, [quick, slow])):
        seen = {
            quick: RememberedStudy(stamp="before"),
            slow: RememberedStudy(stamp="before", took_s=took_s),
        }
        assert list(looked(Scan("", pause_s=0, seen=seen, readings=Inline("")), tmp_path)) == order


def test_what_cannot_be_read_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage may have been away just then; nothing of the study changes after that."""
    make_measured(tmp_path / "train-gpu-h100-16-1")
    one = Scan("", pause_s=0, seen={}, readings=Inline(""))
    with monkeypatch.context() as broken:
        broken.setattr(read, "assemble", lambda *_: 1 / 0)
        (said,) = looked(one, tmp_path).values()
    assert '"unreadable"' in said["text"]
    assert looked(one, tmp_path) == {}
    monkeypatch.setattr(scan, "AGAIN_S", 0.0)
    (said,) = looked(one, tmp_path).values()
    assert '"ended"' in said["text"]


def test_what_could_not_be_read_is_tried_again_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it knows is what the server tells it."""
    name = "train-gpu-h100-16-1"
    make_measured(tmp_path / name)
    with closing(Catalogue(lambda: [tmp_path])) as catalogue:
        with monkeypatch.context() as broken:
            broken.setattr(read, "assemble", lambda *_: 1 / 0)
            for message in Scan("", pause_s=0, seen={}, readings=Inline("")).look(
                [tmp_path], most=20
            ):
                catalogue._hear(message)  # pyright: ignore[reportPrivateUsage]
        assert catalogue.known()[name].summary.state == "unreadable"
        told = json.loads(json.dumps(catalogue._told()))  # pyright: ignore[reportPrivateUsage]
    seen = {name: process._seen(said) for name, said in told.items()}  # pyright: ignore
    (said,) = looked(Scan("", pause_s=0, seen=seen, readings=Inline("")), tmp_path).values()
    assert '"ended"' in said["text"]


def test_what_is_found_comes_in_parts_and_counts_when_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_MOST_NEW", 2)
    names = [f"train-gpu-h100-16-{number}" for number in range(5)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.db").touch()
    said = list(Scan("", pause_s=0, seen={}, readings=Inline("")).look([tmp_path], most=0))
    assert [len(one.get("new", ())) for one in said] == [2, 2, 1, 0]
    assert ["gone" in one for one in said] == [False, False, True, False]
    with closing(Catalogue(lambda: [tmp_path])) as catalogue:
        catalogue.keep_fresh()
        for message, has_looked in zip(said[:3], (False, False, True), strict=True):
            catalogue._hear(message)  # pyright: ignore[reportPrivateUsage]
            assert catalogue.has_looked == has_looked
        assert sorted(catalogue.known()) == names


def test_a_study_that_is_too_long_to_be_told_is_unreadable_and_hides_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train-gpu-h100-16-1", "train-gpu-h100-16-2"):
        make_measured(tmp_path / name)
    lengths = iter((200, 10))
    monkeypatch.setattr(messages, "encode", lambda _: bytes(next(lengths)))
    monkeypatch.setattr(messages, "LONGEST_BYTES", 100)
    one, other = looked(Scan("", pause_s=0, seen={}, readings=Inline("")), tmp_path).values()
    assert '"unreadable"' in one["text"]
    assert "more than the 100 B" in one["missing"]
    assert '"ended"' in other["text"]
