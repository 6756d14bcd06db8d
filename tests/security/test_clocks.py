"""Clocks that jump: no budget, lease or limit is ended or prolonged by what somebody sets."""

from __future__ import annotations

import ast
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from automesh.package import PACKAGE
from automesh.tuner.strategies.search_run import SearchRun
from automesh.tuner.study import lease
from automesh.tuner.study.lease import LeaseTable, StudyLease, take, this_owner
from automesh.tuner.study.lease_tables import FileLeases, SqlLeases
from automesh.tuner.study.study import Study, Trial, parse_storage
from tests.support.samples.storage_cases import opened, plans

HOUR_S = 3600.0
# What may read the time of day: to be shown or noted, or compared with that of files or with a date
# until which somebody may do something.
_SHOWN = {
    "files.py": "when a draft was written, by the file system",
    "hlo/store.py": "when a draft was written, by the file system",
    "program/execute/calibrate.py": "when a profile was made",
    "program/capture/world/seeds.py": "to find out what a script's seed was drawn from",
    "program/surroundings.py": "when a library was installed",
    "report/pages/store.py": "when a program was used",
    "remote/agent.py": "how old a folder is that is left",
    "serve/access.py": "until when a page may be shown",
    "serve/submissions.py": "how long ago a runner was seen, for people",
    "submissions/audit.py": "when something was done",
    "submissions/leases.py": "when an agent was seen, for people",
    "submissions/elapsed.py": "how long a host was off, from one boot to the next",
    "submissions/runner.py": "when a runner was seen, and its searches began",
    "submissions/store.py": "when a search was submitted",
    "submissions/tokens.py": "until when a token holds",
    "tuner/estimated.py": "when a result was made",
    "tuner/measure/decision.py": "when a result was made",
    "tuner/strategies/absent.py": "when a result was made",
    "tuner/study/stored/journal.py": "when the trial began that stands for a damaged one",
    "tuner/study/lease_tables.py": "how old a hold looks, which alone ends none",
}
_OF_THE_DAY = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


class Clocks:
    """The storage's clock, which somebody sets, and that of this process, which runs on."""

    def __init__(self) -> None:
        self.storage_s = 1e9
        self.own_s = 0.0

    def run(self, seconds: float) -> None:
        self.storage_s += seconds
        self.own_s += seconds


@contextmanager
def shared(
    kind: str, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[LeaseTable, LeaseTable]]:
    """The same leases as two hosts have them open."""
    with TemporaryDirectory() as folder:
        tables: list[LeaseTable] = [
            FileLeases(Path(folder) / "holds")
            if kind == "file"
            else SqlLeases(sa.create_engine(f"sqlite:///{folder}/holds.db"))
            for _ in range(2)
        ]
        monkeypatch.setattr(type(tables[0]), "now", lambda _: clocks.storage_s)
        monkeypatch.setattr(lease, "monotonic", lambda: clocks.own_s)
        yield tables[0], tables[1]
        for table in tables:
            table.close()


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_a_clock_that_is_set_forward_ends_no_lease_of_who_is_well(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, what was renewed a second ago was free for an hour's jump of the storage's clock."""
    clocks, elsewhere = Clocks(), replace(this_owner(), machine="another", token="theirs")
    with shared(kind, clocks, monkeypatch) as (mine, theirs):
        assert StudyLease(theirs, "lease", elsewhere).acquire()
        own = StudyLease(mine, "lease", this_owner())
        assert not own.acquire()
        clocks.storage_s += HOUR_S
        for _ in range(30):
            assert not own.acquire()
            assert own.holder() == elsewhere
            clocks.run(2.0)
            assert StudyLease(theirs, "lease", elsewhere).renew()


@pytest.mark.parametrize("kind", ["file", "sql"])
@pytest.mark.parametrize("jump_s", [-HOUR_S, 0.0, HOUR_S])
def test_who_fell_silent_is_followed_in_time_whatever_the_clock_says(
    kind: str, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a clock that was set back an hour kept the lease of the dead for an hour."""
    clocks, elsewhere = Clocks(), replace(this_owner(), machine="another", token="theirs")
    with shared(kind, clocks, monkeypatch) as (mine, theirs):
        assert take(theirs, "trial/1", elsewhere)
        own = this_owner()
        clocks.storage_s += jump_s
        assert not take(mine, "trial/1", own)
        clocks.run(lease.GRACE_S - 1)
        assert not take(mine, "trial/1", own)
        clocks.run(lease.LEASE_S - lease.GRACE_S + 2)
        assert take(mine, "trial/1", own)


def test_who_fell_silent_long_ago_is_followed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, elsewhere = Clocks(), replace(this_owner(), machine="another", token="theirs")
    with shared("sql", clocks, monkeypatch) as (mine, theirs):
        assert take(theirs, "trial/1", elsewhere)
        clocks.run(HOUR_S)
        assert not take(mine, "trial/1", this_owner())
        clocks.run(lease.GRACE_S + 1)
        assert take(mine, "trial/1", this_owner())


@pytest.mark.slow
def test_no_limit_and_no_budget_is_kept_by_the_time_of_day() -> None:
    """All that waits or is bounded reads `time.monotonic` or `time.perf_counter`."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name):
                    is_of_the_day = (module, name) in _OF_THE_DAY
                case ast.ImportFrom(module="time", names=names):
                    is_of_the_day = any(("time", one.name) in _OF_THE_DAY for one in names)
                case _:
                    continue
            if is_of_the_day:
                found.add(str(path.relative_to(PACKAGE)))
    assert found <= set(_SHOWN)


class Reached(Exception):
    """Whatever a search does afterwards is not looked at."""


class Measures:
    """A strategy that comes to measuring some time after the search began."""

    def __init__(self, study: Study, clocks: Clocks, after_s: float) -> None:
        self.study, self.clocks, self.after_s = study, clocks, after_s
        self.begun: Trial | None = None

    def climb(self) -> str:
        self.clocks.run(self.after_s)
        assert self.study.lead()
        self.begun = self.study.measure.begin(plans(1)[0])
        raise Reached


def test_what_a_host_held_that_is_gone_is_free_once_the_search_comes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its hold was first seen when the plan was measured, and the outcome was lost."""
    clocks = Clocks()
    monkeypatch.setattr(lease, "monotonic", lambda: clocks.own_s)
    monkeypatch.setattr(SqlLeases, "now", lambda _: clocks.storage_s)
    storage = parse_storage("", tmp_path / "lm-cpu-8-1234")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lease, "_machine", lambda: "another")
        theirs = opened(storage)
        assert theirs.lead()
        assert theirs.measure.begin(plans(1)[0]) is not None
    clocks.run(HOUR_S)
    with opened(storage) as study:
        strategy: Any = Measures(study, clocks, after_s=11.0)
        silent: Any = SimpleNamespace(note_header=lambda _: None)
        search = SearchRun(
            study=study,
            header=silent,
            notebook=silent,
            rungs=(study.compile,),
            rules="",
            rules_before=(),
            folder=tmp_path,
        )
        assert not study.lead()
        with pytest.raises(Reached):
            search.run(strategy)
        assert strategy.begun is not None
