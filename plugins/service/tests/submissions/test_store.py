"""Submissions: taken once for each key, seen by their owners, changed in one step each."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import sqlalchemy as sa
import sqlalchemy.exc as sa_errors

from automesh import limits
from automesh.errors import UsageError
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.bundle import check, digest_of
from automesh_service.submissions.database import Database
from automesh_service.submissions.home import open_home
from automesh_service.submissions.order import Order, words_of
from automesh_service.submissions.store import Conflict, Missing, Store, TooMany
from automesh_service.submissions.tokens import Holder, Refused, Tokens
from plugins.service.tests.support.service import tar_of

ORDER = Order(entry="train.py", targets=("cpu:2",))


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    home = open_home(tmp_path / "service")
    database = Database(home.database)
    yield Store(home, database)
    database.close()


def keep(store: Store, folder: Path, owner: str, content: bytes = b"x") -> str:
    draft = folder / f"{owner}.draft"
    draft.write_bytes(tar_of({"train.py": content, "my.toml": b""}))
    found = check(draft)
    store.keep_bundle(draft, found, owner)
    assert not draft.exists()
    return found.digest


def test_a_key_makes_one_submission(store: Store, tmp_path: Path) -> None:
    digest = keep(store, tmp_path, "ann")
    first, is_new = store.submit(ORDER, digest, owner="ann", key="k" * 8)
    again, is_new_again = store.submit(ORDER, digest, owner="ann", key="k" * 8)
    assert (is_new, is_new_again) == (True, False)
    assert first == again
    assert (first.state, first.order, first.runs) == ("queued", ORDER, 0)
    with pytest.raises(Conflict, match="another request"):
        store.submit(ORDER.with_budget("2m"), digest, owner="ann", key="k" * 8)
    other, _ = store.submit(ORDER, digest, owner="ann", key="l" * 8)
    assert other.number != first.number
    assert store.listed("ann") == ([other, first], 2)


def test_the_keys_of_two_users_are_not_the_same(store: Store, tmp_path: Path) -> None:
    mine = store.submit(ORDER, keep(store, tmp_path, "ann"), owner="ann", key="k" * 8)[0]
    theirs = store.submit(ORDER, keep(store, tmp_path, "bob"), owner="bob", key="k" * 8)[0]
    assert mine.number != theirs.number


def test_users_see_their_own_alone(store: Store, tmp_path: Path) -> None:
    digest = keep(store, tmp_path, "ann")
    mine, _ = store.submit(ORDER, digest, owner="ann", key="k" * 8)
    with pytest.raises(Missing):
        store.bundle(digest, "bob")
    with pytest.raises(Missing):
        store.submit(ORDER, digest, owner="bob", key="k" * 8)
    for change in (store.get, store.cancel, store.resume):
        with pytest.raises(Missing):
            change(mine.number, "bob")
    assert store.listed("bob") == ([], 0)
    assert store.get(mine.number, None) == mine
    # Who has the same bytes may use them.
    keep(store, tmp_path, "bob")
    assert store.submit(ORDER, digest, owner="bob", key="k" * 8)[1]


def test_the_life_of_a_submission(store: Store, tmp_path: Path) -> None:
    mine, _ = store.submit(ORDER, keep(store, tmp_path, "ann"), owner="ann", key="k" * 8)
    assert store.cancel(mine.number, "ann").state == "cancelled"
    assert store.start_next() is None
    assert store.cancel(mine.number, "ann").state == "cancelled"
    assert store.resume(mine.number, "ann").state == "queued"
    running = store.start_next()
    assert running is not None
    assert (running.number, running.state, running.runs) == (mine.number, "running", 1)
    assert store.start_next() is None
    with pytest.raises(Conflict, match="runs"):
        store.extend(mine.number, "5m", owner="ann", who="ann", key="e" * 8)
    assert store.cancel(mine.number, "ann").is_cancelled
    with pytest.raises(Conflict, match="being cancelled"):
        store.resume(mine.number, "ann")
    store.end(mine.number, "cancelled", "as asked")
    longer = store.extend(mine.number, "5m", owner="ann", who="ann", key="e" * 8)
    assert (longer.state, longer.order.budget, longer.is_cancelled) == ("queued", "5m", False)
    store.start_next()
    store.end(mine.number, "found", "a rule was found")
    # Said once more, because the answer got lost: it is not run once more.
    assert store.extend(mine.number, "5m", owner="ann", who="ann", key="e" * 8).state == "found"
    with pytest.raises(UsageError, match="week"):
        store.extend(mine.number, "8d", owner="ann", who="ann", key="f" * 8)
    assert store.counts() == {"found": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entry": "../train.py"}, "no path inside"),
        ({"entry": "/etc/passwd.py"}, "no path inside"),
        ({"entry": "os:system"}, "no script"),
        ({"entry": "--storage=x.py"}, "no path inside"),
        ({"entry": "train.py:build:x"}, "no script"),
        ({"entry": "missing.py"}, "no file"),
        ({"space": "../../x.toml"}, "no path inside"),
        ({"space": "missing.toml"}, "no file"),
        ({"space": "--help"}, "no search space"),
        ({"hardware": "/etc/x"}, "no TOML"),
        ({"targets": ()}, "no target"),
        ({"args": ("a\0b",)}, "NUL"),
        ({"args": ("a",) * 300}, "words"),
        ({"args": ("a" * 3000,)}, "characters"),
        ({"budget": "1y"}, "not a duration"),
        ({"budget": "300h"}, "week"),
        ({"top": -1}, "top"),
    ],
)
def test_an_order_that_cannot_be_run_is_refused(
    store: Store, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    digest = keep(store, tmp_path, "ann")
    wrong = Order(**{"entry": "train.py", **changes})  # pyright: ignore
    with pytest.raises(UsageError, match=said):
        store.submit(wrong, digest, owner="ann", key="k" * 8)
    assert store.counts() == {}


def test_one_user_cannot_fill_the_queue(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PENDING_SUBMISSIONS", 2)
    digest = keep(store, tmp_path, "ann")
    for key in ("a" * 8, "b" * 8):
        store.submit(ORDER, digest, owner="ann", key=key)
    with pytest.raises(TooMany):
        store.submit(ORDER, digest, owner="ann", key="c" * 8)
    assert not store.submit(ORDER, digest, owner="ann", key="a" * 8)[1]


def test_what_is_queued_again_counts_as_well(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PENDING_SUBMISSIONS", 1)
    digest = keep(store, tmp_path, "ann")
    first, _ = store.submit(ORDER, digest, owner="ann", key="a" * 8)
    store.cancel(first.number, "ann")
    store.submit(ORDER, digest, owner="ann", key="b" * 8)
    with pytest.raises(TooMany):
        store.resume(first.number, "ann")
    with pytest.raises(TooMany):
        store.extend(first.number, "2m", owner="ann", who="ann", key="c" * 8)
    assert store.counts() == {"cancelled": 1, "queued": 1}


def test_a_bundle_that_a_power_cut_has_broken_is_mended_by_sending_it_again(
    store: Store, tmp_path: Path
) -> None:
    digest = keep(store, tmp_path, "ann")
    place = tmp_path / "service" / "bundles" / f"{digest}.tar"
    place.write_bytes(b"")
    assert keep(store, tmp_path, "ann") == digest
    assert digest_of(place) == digest


def test_values_with_dashes_are_no_options(tmp_path: Path) -> None:
    order = Order(entry="train.py", baseline="--rules=/etc/x", args=("--rules", "y"), top=2)
    words = words_of(order, tmp_path)
    assert words[:6] == [*words[:1], "-P", "-m", "automesh", "search", "train.py"]
    assert "--baseline=--rules=/etc/x" in words
    assert words[-3:] == ["--", "--rules", "y"]
    assert f"--rules={tmp_path / 'mesh_rules.toml'}" in words


# Tokens and the audit


def test_tokens_are_kept_as_hashes_and_end(tmp_path: Path) -> None:
    database, now_s = Database(tmp_path / "service.db"), 1000.0
    tokens = Tokens(database, lambda: now_s)
    made = tokens.make("ann", "submit", 60.0)
    found = tokens.check(made)
    assert isinstance(found, Holder)
    assert (found.name, found.may("read"), found.may("submit"), found.may("admin")) == (
        "ann",
        True,
        True,
        False,
    )
    secret = made.rpartition("_")[2]
    assert secret.encode() not in (tmp_path / "service.db").read_bytes()
    assert secret.encode() not in (tmp_path / "service.db-wal").read_bytes()
    for wrong in ("", "x", made[:-1], made[:-1] + "g", made.replace(secret, "0" * 64), secret):
        assert tokens.check(wrong) == Refused(reason="unknown")
    now_s = 1060.0
    assert tokens.check(made) == Refused(reason="expired")
    other = tokens.make("bob", "read", None)
    number = other.split("_")[1]
    tokens.revoke(number)
    assert tokens.check(other) == Refused(reason="revoked")
    assert tokens.holder(number) is None
    assert [(one.name, one.state) for one in tokens.listed()] == [
        ("ann", "expired"),
        ("bob", "revoked"),
    ]
    with pytest.raises(UsageError):
        tokens.revoke(number)
    for name, scope in (("", "read"), ("a b", "read"), ("\x1b", "read"), ("ann", "root")):
        with pytest.raises(UsageError):
            tokens.make(name, scope, None)
    database.close()


def test_the_audit_is_only_added_to(tmp_path: Path) -> None:
    database = Database(tmp_path / "service.db")
    audit = Audit(database)
    audit.note("POST /v1/studies", who="ann", subject="1", status=201)
    audit.note("GET /\x1b[31m", address="10.0.0.1", status=404, said="x" * 5000)
    for statement in ("DELETE FROM audit", "UPDATE audit SET who = 'bob'"):
        with pytest.raises(sa_errors.IntegrityError), database.change() as connection:
            connection.execute(sa.text(statement))
    latest, first = audit.entries()
    assert (first.number, first.who, first.status) == (1, "ann", 201)
    assert latest.action == "GET /"
    assert len(latest.said) < 400
    assert audit.entries(before=2) == [first]
    database.close()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_home(tmp_path / "service")
    (tmp_path / "service").chmod(0o750)
    with pytest.raises(UsageError, match="others than you"):
        open_home(tmp_path / "service")


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "service.db").write_bytes(b"what is this" * 1000)
    with pytest.raises(UsageError, match="cannot be used"):
        Database(tmp_path / "service.db")
