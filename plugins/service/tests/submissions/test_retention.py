"""What a service removes by itself, and what it leaves alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from automesh import limits
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.bundle import check
from automesh_service.submissions.database import Database
from automesh_service.submissions.elapsed import Elapsed
from automesh_service.submissions.home import Home, open_home
from automesh_service.submissions.order import Order
from automesh_service.submissions.retention import Retention
from automesh_service.submissions.store import Missing, Store, TooMany
from plugins.service.tests.support.service import tar_of

ORDER = Order(entry="train.py", targets=("cpu:2",))
DAY_S = 86_400.0


@dataclass(kw_only=True)
class Kept:
    """A service whose time the test sets."""

    home: Home
    database: Database
    now_s: float

    def __post_init__(self) -> None:
        self.day_s = self.now_s
        self.store = Store(self.home, self.database, lambda: self.day_s)
        self.boot = "first"

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.day_s += seconds

    def bundle(self, owner: str, content: bytes = b"x") -> str:
        draft = self.home.folder / "draft"
        draft.write_bytes(tar_of({"train.py": content}))
        found = check(draft)
        self.store.keep_bundle(draft, found, owner)
        return found.digest

    def submit(self, digest: str, key: str = "k" * 8) -> str:
        number = self.store.submit(ORDER, digest, owner="ann", key=key)[0].number
        (self.home.job(number) / "results").mkdir(parents=True)
        return number

    def remove(self, keep_s: float | None = None) -> None:
        Retention(
            home=self.home,
            database=self.database,
            audit=Audit(self.database),
            elapsed=Elapsed(
                database=self.database,
                steady=lambda: self.now_s,
                boot=lambda: self.boot,
                clock=lambda: self.day_s,
            ),
            keep_s=keep_s,
        ).remove_old()


@pytest.fixture
def kept(tmp_path: Path) -> Generator[Kept]:
    home = open_home(tmp_path / "service")
    found = Kept(home=home, database=Database(home.database), now_s=home.folder.stat().st_mtime)
    yield found
    found.database.close()


def test_submissions_that_ended_long_ago(kept: Kept) -> None:
    digest = kept.bundle("ann")
    old, open_one, alive = (kept.submit(digest, key * 8) for key in "klm")
    for number in (old, alive):
        kept.store.end(number, "found", "a rule was found")
    lock = os.open(kept.home.job(alive) / "search.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept.remove(30 * DAY_S)
    kept.wait(29 * DAY_S)
    kept.remove(30 * DAY_S)
    assert kept.store.listed()[1] == 3
    kept.wait(2 * DAY_S)
    kept.remove()  # Nobody has asked for it.
    assert kept.store.listed()[1] == 3
    young = kept.submit(digest, "n" * 8)
    kept.store.end(young, "found", "a rule was found")
    kept.remove(30 * DAY_S)
    os.close(lock)
    assert {one.number for one in kept.store.listed()[0]} == {open_one, alive, young}
    assert sorted(one.name for one in kept.home.jobs.iterdir()) == sorted([open_one, alive, young])
    with pytest.raises(Missing):
        kept.store.get(old, None)
    removed = [one.subject for one in Audit(kept.database).entries() if one.action == "removed"]
    assert removed == [old]
    # Its key is free again, and what was cut short is finished.
    assert kept.store.submit(ORDER, digest, owner="ann", key="k" * 8)[1]
    kept.home.job("0" * 16).mkdir()
    kept.remove(30 * DAY_S)
    kept.wait(30 * DAY_S)
    kept.remove(30 * DAY_S)
    assert not kept.home.job("0" * 16).exists()


def test_bundles_that_nobody_uses_and_drafts(kept: Kept) -> None:
    used, unused, again, shared = (kept.bundle("ann", name) for name in (b"1", b"2", b"3", b"4"))
    kept.bundle("bob", b"4")
    job = kept.home.job(kept.submit(used))
    draft = kept.home.bundle("x").with_name("tmp.draft")
    draft.write_bytes(b"")
    # What a server was putting in place that was killed, and a link that somebody's code has left.
    state, link = job / "x.draft", job / "link.draft"
    (state / "new").mkdir(parents=True)
    link.symlink_to(job / "results")
    kept.remove()
    assert draft.exists() and state.exists()
    kept.wait(limits.BUNDLE_UNUSED_S + 1.0)
    assert kept.bundle("ann", b"3") == again
    kept.bundle("bob", b"4")
    kept.remove()
    assert not (draft.exists() or state.exists() or link.is_symlink())
    assert (job / "results").is_dir()
    there = {one.stem for one in kept.home.bundle("x").parent.iterdir()}
    assert there == {used, again, shared}
    for digest in (unused, shared):
        with pytest.raises(Missing):
            kept.store.bundle(digest, "ann")
    assert kept.store.bundle(shared, "bob").digest == shared


def test_one_user_cannot_fill_the_disk_with_bundles(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(tar_of({"train.py": b"1"}))
    monkeypatch.setattr(limits, "BUNDLES_OF_ONE_BYTES", 2 * size)
    kept.bundle("ann", b"1")
    kept.bundle("ann", b"2")
    kept.bundle("ann", b"2")
    with pytest.raises(TooMany, match="bundles of yours"):
        kept.bundle("ann", b"3")
    kept.bundle("bob", b"3")


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, 400 * DAY_S])
def test_a_clock_that_jumps_removes_nothing_early(kept: Kept, jump_s: float) -> None:
    """Before, what was kept for an hour was gone as soon as somebody set the clock a day ahead."""
    digest = kept.bundle("ann")
    number = kept.submit(digest)
    kept.store.end(number, "found", "a rule was found")
    spare = kept.bundle("ann", b"spare")
    draft = kept.home.bundle("x").with_name("tmp.draft")
    draft.write_bytes(b"")
    kept.remove(3600.0)
    kept.day_s += jump_s
    for _ in range(3):  # A service that is started again knows what the former one has seen.
        kept.remove(3600.0)
        assert kept.store.get(number, None).state == "found"
        assert kept.home.job(number).exists() and draft.exists()
        assert kept.store.bundle(spare, "ann")
    kept.wait(3601.0)
    kept.day_s -= jump_s
    kept.remove(3600.0)
    with pytest.raises(Missing):
        kept.store.get(number, None)
    assert not kept.home.job(number).exists() and not draft.exists()
    assert kept.store.bundle(spare, "ann")


def test_the_time_between_two_boots_counts(kept: Kept) -> None:
    number = kept.submit(kept.bundle("ann"))
    kept.store.end(number, "found", "a rule was found")
    kept.remove(DAY_S)
    kept.boot, kept.now_s = "second", 5.0
    kept.day_s += DAY_S / 2
    kept.remove(DAY_S)
    kept.boot = "third"
    kept.day_s -= DAY_S  # The host has lost its clock: it is not older by that.
    kept.remove(DAY_S)
    kept.wait(DAY_S / 2 - 1.0)
    kept.remove(DAY_S)
    assert kept.store.get(number, None).state == "found"
    kept.wait(1.0)
    kept.remove(DAY_S)
    with pytest.raises(Missing):
        kept.store.get(number, None)


def test_one_that_is_queued_again_is_as_young_as_its_next_end(kept: Kept) -> None:
    number = kept.submit(kept.bundle("ann"))
    kept.store.end(number, "failed", "")
    kept.remove(DAY_S)
    kept.wait(DAY_S)
    kept.store.resume(number, owner=None)
    kept.store.end(number, "found", "a rule was found")
    kept.remove(DAY_S)
    assert kept.store.get(number, None).state == "found"
