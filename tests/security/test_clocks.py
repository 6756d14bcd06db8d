"""Clocks that jump: no budget, lease or limit is ended or prolonged by what somebody sets."""

from __future__ import annotations

import ast
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa

from automesh.package import PACKAGE
from automesh.tuner.study import lease
from automesh.tuner.study.lease import Lease, LeaseTable, take, this_owner
from automesh.tuner.study.lease_tables import FileLeases, SqlLeases

HOUR_S = 3600.0
# What may read the time of day: to be shown or noted, or compared with that of files.
_SHOWN = {
    "files.py": "when a draft was written, by the file system",
    "hlo/store.py": "when a draft was written, by the file system",
    "program/execute/calibrate.py": "when a profile was made",
    "program/surroundings.py": "when a library was installed",
    "report/pages/store.py": "when a program was used",
    "tuner/dry_run.py": "when a result was made",
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
        assert Lease(theirs, "lease", elsewhere).acquire()
        own = Lease(mine, "lease", this_owner())
        assert not own.acquire()
        clocks.storage_s += HOUR_S
        for _ in range(30):
            assert not own.acquire()
            assert own.holder() == elsewhere
            clocks.run(2.0)
            assert Lease(theirs, "lease", elsewhere).renew()


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
