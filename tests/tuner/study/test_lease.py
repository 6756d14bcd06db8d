"""Leases: who has what, whatever dies in between."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.tuner.study import lease
from automesh.tuner.study.lease import (
    LeaseRow,
    LeaseTable,
    Owner,
    StudyLease,
    is_dead,
    take,
    this_owner,
)
from automesh.tuner.study.lease_tables import FileLeases, SqlLeases

ELSEWHERE = Owner(host="other", machine="other", pid=1, start="1", token="t")


def test_a_living_process_is_not_dead() -> None:
    assert not is_dead(this_owner())
    assert this_owner() != this_owner()


def test_a_process_of_another_machine_is_never_known_to_be_dead() -> None:
    assert not is_dead(replace(this_owner(), machine="other", pid=2**22 + 1))


def test_a_reused_pid_is_not_the_same_process() -> None:
    assert is_dead(replace(this_owner(), start="12345"))


def test_ended_and_zombie_processes_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(this_owner(), pid=child.pid, start=lease._process_start(child.pid))
    assert not is_dead(owner)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and left as a zombie
    assert is_dead(owner)
    child.communicate()
    assert is_dead(owner)


@contextmanager
def empty_holds(kind: str) -> Iterator[LeaseTable]:
    with TemporaryDirectory() as folder:
        holds: LeaseTable = (
            FileLeases(Path(folder) / "holds")
            if kind == "file"
            else SqlLeases(sa.create_engine(f"sqlite:///{folder}/holds.db"))
        )
        yield holds
        holds.close()


KINDS = pytest.mark.parametrize("kind", ["file", "sql"])
KEYS = ("a/1", "a/10", "a_1", "b%/1")
OWNERS = tuple(replace(ELSEWHERE, token=str(number)) for number in range(2))


@pytest.mark.slow
@KINDS
@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["swap", "stale swap", "renew", "free"]),
            st.sampled_from(KEYS),
            st.sampled_from(OWNERS),
        ),
        max_size=12,
    )
)
def test_swaps_compare_and_set(kind: str, steps: list[tuple[str, str, Owner]]) -> None:
    model: dict[str, Owner] = {}
    seen: dict[str, list[LeaseRow | None]] = {key: [None] for key in KEYS}
    with empty_holds(kind) as holds:
        for action, key, owner in steps:
            now = holds.get(key)
            if action == "stale swap":
                old = [hold for hold in seen[key] if hold != now]
                assert not any(holds.swap(key, hold, owner) for hold in old)
            elif action == "renew":
                holds.renew(owner)
            elif action == "free":
                assert holds.swap(key, now, None) is (now is not None)
                model.pop(key, None)
            else:
                assert holds.swap(key, now, owner)
                model[key] = owner
            seen[key].append(now)
            assert {key: hold.owner for key, hold in holds.under("").items()} == model
            for prefix in ("a/", "a/1", "a_", "b%"):
                expected = {key for key in model if key.startswith(prefix)}
                assert set(holds.under(prefix)) == expected


@KINDS
def test_renewing_restarts_the_clock_of_ones_own(kind: str) -> None:
    with empty_holds(kind) as holds:
        for key, owner in zip(KEYS, (OWNERS[0], OWNERS[1], OWNERS[0]), strict=False):
            assert take(holds, key, owner)
        before = holds.under("")
        holds.renew(OWNERS[0])
        after = holds.under("")
        changed = {key for key in before if before[key] != after[key]}
        assert changed == {KEYS[0], KEYS[2]}
        assert all(after[key].renewed_s >= before[key].renewed_s for key in before)
        assert abs(holds.now() - after[KEYS[0]].renewed_s) < 10


@KINDS
def test_a_dead_holder_is_replaced_at_once_and_a_silent_one_later(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty_holds(kind) as holds:
        me = this_owner()
        mine = StudyLease(holds, "lease", me)
        assert mine.holder() is None
        assert take(holds, "lease", replace(me, start="long ago"))
        assert mine.holder() is None
        assert mine.acquire()
        assert mine.holder() == me
        mine.release()
        mine.release()
        assert take(holds, "lease", ELSEWHERE)
        assert not mine.acquire()
        assert mine.holder() == ELSEWHERE
        monkeypatch.setattr(lease, "LEASE_S", -1.0)
        assert mine.acquire()
        assert not StudyLease(holds, "lease", ELSEWHERE).renew()
