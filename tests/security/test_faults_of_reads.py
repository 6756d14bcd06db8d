"""Every file and storage that automesh reads, in every state that others may leave it in.

A file is refused in one sentence with exit code 2, or left out and named, or made again; never
is there another exception, a wait, or a change of what lies there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from automesh import api, limits
from automesh.cli.guard import guarded
from automesh.errors import UsageError
from automesh.hardware.calibration.profile_files import find_profile, merge_profile, profile_path
from automesh.hlo.store import ModuleStore
from automesh.mesh.rules.file import check_mergeable, format_rules, read_rules
from automesh.program.lower import program_text
from automesh.program.lower.program_text import TextLine
from automesh.program.script.payload import read_payload
from automesh.skipped import Skipped
from automesh.space.spec import read_space
from automesh.tuner.command.run import Manner, Place, recovered
from automesh.tuner.command.step_times import (
    CaptureReader,
    CaptureSource,
    JsonLines,
    JsonReader,
    Mark,
)
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.explain.study import estimate_rows
from automesh.tuner.study.study import Study, open_study, parse_storage
from automesh.worker.messages import Surroundings
from automesh.worker.process import log_tail
from tests.hardware.calibration.test_profile import PROBES, point, profile_of
from tests.hardware.test_clusters import LAB
from tests.hlo.test_store import KEPT
from tests.support.cases.bad_inputs import RULES
from tests.support.samples import explain_samples as samples
from tests.support.samples.storage_cases import compiled, opened, plans
from tests.tuner.explain.test_study import VERSIONS, make_study, propagated

NOBODY = 65534
PATIENCE_S = 20
LINES = [{"kind": "jax", "version": "1"}, {"kind": "step", "name": "step", "file": "t.py"}]
LINES += [{"kind": "sample", "seconds": 0.5, "steps": 2}, {"kind": "done"}]
TIMER = "".join(json.dumps(line) + "\n" for line in LINES)
SPACE = '[axes]\ndp = {}\ntp = {}\n[knobs]\nremat = ["full", "none"]\n'
SECONDS = "".join(f'{{"step_time": 0.{number}}}\n' for number in range(1, 9))


def build(mesh: object) -> None:
    """What a notebook may send to another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A file that automesh reads.

    Attributes:
      make: makes it, with all that it needs, in an empty folder; gives its path.
      read: reads it; gives what it says of it, one sentence a line, or refuses it.
      outcome: what becomes of a damaged one: `refused`, `named` (left out, and named), `silent`
        (as good as not there: it is made again), or `any` (what is damaged in it cannot be seen).
      limit: the constant that bounds its size.
      by_people: whether people write it, with whatever editor.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], str]
    outcome: str
    limit: str = "PEOPLE_FILE_BYTES"
    by_people: bool = False


def written(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return make


def _json_rules(folder: Path) -> Path:
    rules = read_rules(written("r.toml", RULES)(folder))
    return written("rules.json", format_rules(rules, as_json=True))(folder)


def _rules(path: Path) -> str:
    check_mergeable(path)
    return str(api.load(path).rules[0].match)


def _profile_path(folder: Path) -> Path:
    return profile_path(folder, platform="cpu", device_kind="cpu", num_devices=8, host="host")


def _profile(folder: Path) -> Path:
    path = _profile_path(folder)
    merge_profile(path, profile_of([point(PROBES[0], 1e-6)]))
    return path


def _find_profile(path: Path) -> str:
    environ = {"AUTOMESH_PROFILES": str(path.parent)}
    found = find_profile("cpu", "cpu", 8, environ=environ, host="host")
    return type(found).__name__


def _study(folder: Path) -> Path:
    """A study with one compiled plan, and with terms and estimates of six."""
    study = make_study(folder / "train-gpu-h100-16-0123abcd")
    with opened_as_made(study / "study.db") as opened_study:
        opened_study.lead()
        (trial,) = opened_study.compile.enqueue([samples.plan("fsdp:16", remat="full")])
        claimed = opened_study.compile.claim()
        assert claimed == replace(trial, state="running", owner=claimed.owner, attempts=1)
        opened_study.compile.finish(claimed, compiled(0.5))
    return study


def opened_as_made(database: Path) -> Study:
    place = parse_storage("", database.parent)
    return open_study(place, database.parent.name, source_hash="abc", versions=VERSIONS)


def _show(database: Path) -> str:
    return "\n".join(api.show(database.parent).found.notices)


def _journal(folder: Path) -> Path:
    path = folder / "train" / "a.journal"
    with opened(parse_storage(str(path), folder)) as study:
        study.lead()
        study.compile.enqueue(plans(2))
        trial = study.compile.claim()
        assert trial is not None
        study.compile.finish(trial, compiled(0.5))
    return path


def _open_journal(path: Path) -> str:
    with opened(parse_storage(str(path), path.parent)) as study:
        study.compile.trials()
        study.leader()
        return "\n".join(study.skipped.notices())


def _explain(study: Path) -> str:
    return "\n".join(api.explain(study, "fsdp:16 remat=full").found.notices)


def _terms(folder: Path) -> Path:
    """Those of another plan than is explained."""
    terms = _study(folder) / "terms"
    cache = TermsCache(folder=terms, source_hash="abc", versions=VERSIONS)
    job, _ = propagated(samples.plan("tp:16", remat="none"))
    return terms / cache._name(job)


def _read_terms(path: Path) -> str:
    cache = TermsCache(folder=path.parent, source_hash="abc", versions=VERSIONS)
    cache.all()
    return "\n".join(cache.skipped.notices())


def _read_table(path: Path) -> str:
    skipped = Skipped()
    for _ in estimate_rows(path, skipped):
        pass
    return "\n".join(skipped.notices())


def _stored(folder: Path) -> Path:
    ModuleStore(folder).keep("0" * 64, KEPT)
    return folder / f"{'0' * 64}.module"


def _find_stored(path: Path) -> str:
    store = ModuleStore(path.parent)
    return f"{store.find('0' * 64) == KEPT} {len(store.entries())}"


def _payload(folder: Path) -> Path:
    path = folder / "build.pickle"
    path.write_bytes(pickle.dumps(([], pickle.dumps(build))))
    return path


def _program(folder: Path) -> Path:
    path = folder / "program.txt"
    program_text.write_text(path, [TextLine(text="add", place="t.py:1")] * 20)
    return path


def _json_lines(path: Path) -> str:
    reader = JsonReader(path, JsonLines(file=str(path)), Mark(), skip=0, steps=4)
    steps = reader.read()
    return " ".join(steps.problem) if len(steps.samples_s) < 4 else "all"


def _timer_lines(path: Path) -> str:
    steps = CaptureReader(path.parent).read()
    return " ".join(steps.problem) if not steps.is_enough else "all"


def _run(folder: Path) -> Place:
    place = Place(logs=folder, name="run-0001")
    place.steps.mkdir(parents=True, exist_ok=True)
    return place


def _recover(path: Path) -> str:
    place = Place(logs=path.parent.parent, name=path.parent.name)
    lines = JsonLines(file=str(place.logs / "m.jsonl"))
    manner = Manner(
        program="true",
        surroundings=Surroundings(platforms="cpu", cpu_devices=8),
        source=lines if path.name == "mark.json" else CaptureSource(),
        skip=0,
        steps=4,
        timeout_s=1.0,
        memory_limit_bytes=2**30,
        cache_dir=path.parent,
    )
    return type(recovered(manner, place)).__name__


def _mark(folder: Path) -> Path:
    written("m.jsonl", SECONDS)(folder)
    return written("run-0001/mark.json", '{"size": 0, "last": ""}')(_run(folder).logs)


def _ending(folder: Path) -> Path:
    ending = {"code": 0, "over_limit": False, "kernel_killed": False, "peak_bytes": 1}
    return written("run-0001/ended.json", json.dumps(ending) + "\n")(_run(folder).logs)


KINDS = {
    "rules": Kind(
        make=written("mesh_rules.toml", RULES), read=_rules, outcome="refused", by_people=True
    ),
    "rules as JSON": Kind(make=_json_rules, read=_rules, outcome="refused", by_people=True),
    "space": Kind(
        make=written("space.toml", SPACE),
        read=lambda path: read_space(str(path)).name,
        outcome="refused",
        by_people=True,
    ),
    "clusters": Kind(
        make=written("our.toml", LAB),
        read=lambda path: str(api.targets("lab", hardware=path)),
        outcome="refused",
        by_people=True,
    ),
    "calibration": Kind(make=_profile, read=_find_profile, outcome="refused"),
    "database": Kind(
        make=lambda folder: _study(folder) / "study.db", read=_show, outcome="refused"
    ),
    "journal": Kind(
        make=_journal, read=_open_journal, outcome="refused", limit="JOURNAL_LINE_BYTES"
    ),
    "holds": Kind(
        make=lambda folder: _journal(folder).with_name("a.journal.holds"),
        read=lambda path: _open_journal(path.with_name("a.journal")),
        outcome="refused",
        limit="HOLDS_BYTES",
    ),
    "terms": Kind(
        make=_terms,
        read=_read_terms,
        outcome="named",
        limit="TERMS_BYTES",
    ),
    "estimates": Kind(
        make=lambda folder: _study(folder) / "estimates.csv",
        read=_read_table,
        outcome="named",
        limit="ESTIMATES_BYTES",
    ),
    "compiled program": Kind(
        make=_stored, read=_find_stored, outcome="silent", limit="MODULE_BYTES"
    ),
    "pickled build": Kind(
        make=_payload,
        read=lambda path: str(read_payload(path)),
        outcome="refused",
        limit="PAYLOAD_BYTES",
    ),
    "program text": Kind(
        make=_program,
        read=lambda path: str(program_text.read_text(path)),
        outcome="any",
        limit="PROGRAM_TEXT_BYTES",
    ),
    "JSON lines": Kind(
        make=written("metrics.jsonl", SECONDS), read=_json_lines, outcome="any", limit=""
    ),
    "lines of a timer": Kind(
        make=written("steps/1.jsonl", TIMER), read=_timer_lines, outcome="any", limit=""
    ),
    "mark of a run": Kind(
        make=_mark, read=_recover, outcome="silent", limit="SMALL_RECORD_BYTES"
    ),
    "ending of a run": Kind(
        make=_ending, read=_recover, outcome="silent", limit="SMALL_RECORD_BYTES"
    ),
    "log": Kind(make=written("run.log", "a line\n" * 9), read=log_tail, outcome="any", limit=""),
}  # fmt: skip


# What may have become of a file. Each leaves something in its place.


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _behind_a_link(path: Path) -> None:
    other = path.with_name(f"elsewhere{path.suffix}")
    path.rename(other)
    path.symlink_to(other.name)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _content(lambda data: data[: len(data) * 2 // 3]),
    "emptied": _content(lambda data: b""),
    "flipped": _content(_flipped),
    "zeros": _content(lambda data: b"\0" * len(data)),
    "not UTF-8": _content(lambda data: b"\xff\xfe" + data),
    "nested lists": _content(lambda data: b"[" * 100_000),
    "nested lists in a table": _content(lambda data: b"a = " + b"[" * 3000 + b"]" * 3000),
    "nested tables": _content(lambda data: b'{"a":' * 3000 + b"1" + b"}" * 3000),
    "a long key": _content(lambda data: b"a." * 3000 + b"a = 1"),
    "a large number": _content(lambda data: b'{"schema": ' + b"9" * 5000 + b"}"),
    "a large number in a table": _content(lambda data: b"schema = " + b"9" * 5000),
    "another program's": _content(lambda data: b"PK\x03\x04" + os.urandom(300)),
    "directory": _instead(Path.mkdir),
    "named pipe": _instead(os.mkfifo),
    "socket": _instead(_socket),
    "link to nothing": _instead(lambda path: path.symlink_to("nothing")),
    "link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "link to a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "unreadable": lambda path: path.chmod(0),
}
HARMLESS: dict[str, Callable[[Path], None]] = {
    "unchanged": lambda path: None,
    "behind a link": _behind_a_link,
    "of somebody else": lambda path: os.chown(path, NOBODY, NOBODY) if not os.geteuid() else None,
    "read-only": lambda path: path.chmod(0o444),
}
EDITORS: dict[str, Callable[[Path], None]] = {
    "with a byte order mark": _content(lambda data: b"\xef\xbb\xbf" + data),
    "with Windows' line ends": _content(lambda data: data.replace(b"\n", b"\r\n")),
}
# Nothing is there: then a file is made, or that there is none is said.
ABSENCES = ("link to nothing",)
# What empty files of these kinds mean: no rules yet would be a surprise, no trials are none.
EMPTY = ("journal", "holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What reading a file came to: the exit code, what was told, what was complained of."""

    code: int
    said: str
    error: str


@pytest.fixture
def folder() -> Generator[Path]:
    """A folder with a short name, which everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="am-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@contextlib.contextmanager
def patience() -> Generator[None]:
    """Ends what waits for ever."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"no end after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def as_nobody(folder: Path) -> Generator[None]:
    """Root may read everything: so it becomes somebody else, who owns all but the file."""
    if os.geteuid():
        yield
        return
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and path.stat().st_mode & 0o777:
            os.chown(path, NOBODY, NOBODY)
            path.chmod(path.stat().st_mode | 0o700 * path.is_dir() | 0o600)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def read(kind: Kind, path: Path, capsys: pytest.CaptureFixture[str]) -> Read:
    """Reads a file as a command would."""
    said: list[str] = []
    capsys.readouterr()
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with patience():
            code = guarded(lambda: said.append(kind.read(path)), [])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Read(code=code, said="".join(said), error=capsys.readouterr().err)


def state_of(path: Path) -> tuple[object, ...]:
    """What must not change: what it is, and what is in it."""
    status = path.lstat()
    inside = path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_mode & 0o400 else b""
    return stat.S_IFMT(status.st_mode), inside, path.is_symlink() and path.readlink()


def check_refusal(found: Read, path: Path) -> None:
    error, *hints = found.error.splitlines()
    assert error.startswith("error: ")
    assert all(hint.startswith("hint: ") for hint in hints)
    assert len(hints) <= 1
    assert "Traceback" not in found.error
    assert len(error) < 1000
    assert path.name in error or path.parent.name in error


def copies(kind: Kind, folder: Path) -> Generator[Path]:
    """A file of a kind, again and again as it was made, with all that it needs."""
    here, saved = folder / "here", folder / "saved"
    here.mkdir(parents=True)
    path = kind.make(here)
    shutil.copytree(here, saved)
    while True:
        yield path
        shutil.rmtree(here)
        shutil.copytree(saved, here)


@pytest.mark.parametrize("name", KINDS)
def test_damaged(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS[name]
    read(kind, next(copies(kind, folder / "warm")), capsys)  # Imports what nobody may.
    for (damage, apply), path in zip(DAMAGES.items(), copies(kind, folder), strict=False):
        apply(path)
        before = state_of(path)
        with as_nobody(folder) if damage == "unreadable" else contextlib.nullcontext():
            found = read(kind, path, capsys)
        assert found.code in (0, 2), (damage, found)
        if found.code:
            check_refusal(found, path)
        judge(name, kind, damage, found, path)
        # What opens a journal writes to it: it cuts a torn line off, and makes what is missing.
        if name != "journal" or found.code:
            assert state_of(path) == before, damage


def judge(name: str, kind: Kind, damage: str, found: Read, path: Path) -> None:
    """Whether a damaged file had the outcome that files of its kind have."""
    if damage == "emptied" and name in EMPTY:
        return
    if damage == "zeros" and name == "holds":
        return  # As a power cut leaves it.
    if damage in ABSENCES and name in ("calibration", "holds", "journal", "rules", "rules as JSON"):
        return
    match kind.outcome:
        case "refused" if name in ("database", "journal") and damage in ("flipped", "truncated"):
            # A part may be left out, or torn off by a kill.
            return
        case "refused":
            assert found.code == 2, (damage, found)
        case "named":
            assert found.code == 0, (damage, found)
            assert path.name in found.said, (damage, found)
            assert "is damaged and left out: " in found.said
        case "silent":
            assert found.code == 0, (damage, found)
        case _:
            return


@pytest.mark.parametrize("name", KINDS)
def test_harmless(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS[name]
    changes = HARMLESS | (EDITORS if kind.by_people else {})
    said: dict[str, str] = {}
    for (change, apply), path in zip(changes.items(), copies(kind, folder), strict=False):
        apply(path)
        found = read(kind, path, capsys)
        assert (found.code, found.error) == (0, ""), (change, found)
        said[change] = found.said
    assert len(set(said.values())) == 1, said


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.limit])
def test_too_large(
    name: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = KINDS[name]
    path = kind.make(folder)
    if name == "database":
        return  # Read by SQLite, page by page.
    if kind.limit == "PEOPLE_FILE_BYTES":
        with path.open("ab") as file:
            file.write(b"\n" * (limits.PEOPLE_FILE_BYTES + 1))
    else:
        monkeypatch.setattr(limits, kind.limit, 1)
    found = read(kind, path, capsys)
    if kind.outcome == "silent":
        assert found.code == 0
    elif kind.outcome == "named":
        assert "holds more than 1 B" in found.said + found.error
    else:
        assert found.code == 2
        check_refusal(found, path)
        assert "more than " in found.error or "is damaged" in found.error or "is not" in found.error


def test_a_damaged_table_of_estimates_is_named_where_a_plan_is_explained(folder: Path) -> None:
    table = _study(folder) / "estimates.csv"
    head, *rows = table.read_text().splitlines()
    table.write_text(
        "\n".join([head, "what,is,this", rows[0], rows[1].replace(":", "?"), *rows[2:]])
    )
    said = _explain(table.parent)
    assert "row 1 of `estimates.csv` is damaged and left out: it has 3 cells, its head " in said
    assert "row 3 of `estimates.csv` is damaged and left out: " in said
    table.unlink()
    os.mkfifo(table)
    assert "`estimates.csv` is damaged and left out: " in _explain(table.parent)


def test_damaged_terms_are_named_where_a_plan_is_explained(folder: Path) -> None:
    path = _terms(folder)
    path.write_bytes(b"[" * 100_000)
    assert f"`terms/{path.name}` is damaged and left out: " in _explain(path.parent.parent)
    for one in path.parent.glob("*.json"):
        one.write_bytes(b"{")
    with pytest.raises(UsageError, match="keeps no terms: `terms/") as caught:
        _explain(path.parent.parent)
    assert caught.value.hint == "run its search again, which makes them anew"


def test_a_damaged_header_is_told_with_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = _study(folder) / "study.db"
    with opened_as_made(database) as study:
        study.note("header", {"plans": "many"})
    found = read(KINDS["database"], database, capsys)
    assert found.code == 2
    assert "the header of the study in " in found.error
    assert "is damaged: " in found.error
    assert "run its search again" in found.error


def test_a_damaged_note_and_trial_are_named_in_what_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = _study(folder) / "study.db"
    with opened_as_made(database) as study:
        study.lead()
        (trial, _) = study.compile.enqueue(plans(2))
        storage = study.compile.optuna_study._storage
        storage.set_trial_user_attr(trial.storage_id, "plan_json", "{")
        mine = {"source_hash": "abc", "versions": {"jax": "0.10.2"}, "value": 7}
        study.note("decision.abc", mine)
        study.note("footer.abc", mine)
    found = read(KINDS["database"], database, capsys)
    assert (found.code, found.error) == (0, "")
    for what in ("trial 1 of `compile`", "the note `decision`", "the note `footer`"):
        assert f"{what} is damaged and left out: " in found.said


def test_a_run_is_repeated_if_nobody_can_tell_which_lines_are_its_own(folder: Path) -> None:
    path = _mark(folder)
    assert _recover(path) == "FinishedRun"
    path.write_bytes(b'{"size": -1, "last": "zz"}')
    assert _recover(path) == "NoneType"


def test_the_first_few_damages_are_named_and_the_others_counted() -> None:
    skipped = Skipped()
    for number in range(limits.NAMED_DAMAGES + 3):
        skipped.note(f"row {number}", UsageError("it is\n torn"))
        skipped.note(f"row {number}", UsageError("again"))
    *named, more = skipped.notices()
    assert named[0] == "row 0 is damaged and left out: it is torn"
    assert len(named) == limits.NAMED_DAMAGES
    assert more == "3 more records are damaged as well"
