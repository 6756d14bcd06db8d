"""What agents say to a service: leases, and what may still come from who has lost one."""

from __future__ import annotations

import gzip
import io
import math
import sqlite3
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from automesh import limits
from automesh_service.serve import catalogue as catalogues
from automesh_service.serve.limiter import Limiter
from automesh_service.submissions import leases as leases_module
from automesh_service.submissions.database import Database
from automesh_service.submissions.leases import Offer
from automesh_service.submissions.store import Store
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import (
    Reply,
    Running,
    make_measured,
    running_service,
    tar_of,
)
from tests.support.hot_journal import plant_journal

OFFER: dict[str, Any] = {"name": "gpu-7", "takes": ["*"], "has": ["gpu-h100-8"], "place": "/a"}
OFFER_NOUN = Offer(name="gpu-7", takes=("*",), has=(), place="/a", cores=1, memory_bytes=0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("agents")
    make_measured(folder / "results" / "train-gpu-h100-16-0123abcd")
    with running_service(folder) as service:
        for name in ("agent", "other"):
            service.tokens[name] = service.service.tokens.make(f"{name}-7", "agent", None)
        yield service


@pytest.fixture(autouse=True)
def _nothing_waits(running: Running) -> None:
    object.__setattr__(running.service, "limiter", Limiter())
    store = running.service.store
    for one in store.listed(states=("queued",))[0]:
        store.cancel(one.number, None)


def queue(running: Running, **changes: Any) -> str:
    return submit(running, running.send_bundle(BUNDLE), **changes).json()["number"]


def take(running: Running, token: str = "agent", **changes: Any) -> Reply:
    return running.ask("POST", "/v1/agent/leases", token=token, body={**OFFER, **changes})


def leased(running: Running, **changes: Any) -> tuple[str, str]:
    """The number of a submission, and the path of its lease."""
    number = queue(running)
    found = take(running, **changes)
    assert (found.status, found.json()["number"]) == (200, number), found.text
    return number, f"/v1/agent/leases/{found.json()['id']}"


def say(running: Running, path: str, token: str = "agent", **body: Any) -> Reply:
    return running.ask("POST", path, token=token, body=body)


def state(running: Running, number: str) -> str:
    return running.service.store.get(number, None).state


def database(folder: Path, text: str) -> bytes:
    path = folder / "made.db"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE studies (study_id INTEGER, study_name TEXT)")
        made.execute("INSERT INTO studies VALUES (1, ?)", (text,))
        made.commit()
    return path.read_bytes()


def lose(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets all agents be silent for too long."""
    monkeypatch.setattr(limits, "LEASE_S", -1.0)
    found = [one.number for one in running.service.leases.end_lost()]
    monkeypatch.undo()
    return found


def test_the_life_of_a_lease(running: Running, tmp_path: Path) -> None:
    number, path = leased(running)
    assert state(running, number) == "running"
    assert take(running, "other").status == 204
    assert running.ask("GET", f"{path}/bundle", token="agent").body == BUNDLE
    assert running.ask("GET", f"{path}/state", token="agent").status == 404
    assert say(running, f"{path}/beat").json() == {"is_cancelled": False, "log_bytes": 0}

    def log(offset: int, data: bytes) -> int:
        reply = running.ask("POST", f"{path}/log?offset={offset}", token="agent", body=data)
        return reply.json()["bytes"]

    assert log(0, b"first\n") == 6
    assert log(0, b"first\nsecond\n") == 13  # The answer to the first had got lost.
    assert log(0, b"first\n") == 13
    assert log(20, b"beyond a gap\n") == 13
    shown = running.ask("GET", f"/v1/submissions/{number}/log", token="submit").text
    assert shown == "first\nsecond\n"
    rules = b"schema = 1\n"
    files = {"results/mine-1/study.db": database(tmp_path, "new"), "mesh_rules.toml": rules}

    def send(sequence: int, data: bytes) -> int:
        target = f"{path}/state?sequence={sequence}"
        return running.ask("PUT", target, token="agent", body=data).status

    assert send(2, gzip.compress(tar_of(files))) == 204
    job = running.service.home.job(number)
    assert (job / "results" / "mine-1" / "study.db").read_bytes() == files[
        "results/mine-1/study.db"
    ]
    old = {"results/mine-1/study.db": database(tmp_path, "old")}
    for sequence in (1, 2):  # A replay changes nothing.
        assert send(sequence, tar_of(old)) == 412
    assert (job / "results" / "mine-1" / "study.db").read_bytes() == files[
        "results/mine-1/study.db"
    ]
    assert send(3, tar_of({"results/mine-2/study.db": b""})) == 204
    assert {one.name for one in (job / "results").iterdir()} == {"mine-1", "mine-2"}
    assert not list(job.glob("*.draft"))
    assert say(running, f"{path}/end", code=0).json() == {"state": "found"}
    got = running.ask("GET", f"/v1/submissions/{number}/rules.toml", token="submit")
    assert got.body == rules
    for tail in ("beat", "end"):
        assert say(running, f"{path}/{tail}").status == 409
    said = [
        (one["action"], one["who"], one["said"])
        for one in running.audited()
        if one["subject"] == number
    ]
    assert said[:2] == [
        ("end", "ann", "found, says agent-7/gpu-7"),
        ("run", "ann", "by agent-7/gpu-7"),
    ]


def test_who_has_lost_a_lease_changes_nothing(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, path = leased(running)
    assert lose(running, monkeypatch) == [number]
    assert state(running, number) == "queued"
    second = take(running, "other", name="gpu-8").json()
    assert (second["number"], second["run"]) == (number, 2)
    # The first one comes back: also a holder of the same name has another lease.
    tar = tar_of({"results/mine-1/study.db": database(tmp_path, "stale")})
    asked = (
        say(running, f"{path}/beat"),
        running.ask("PUT", f"{path}/state?sequence=9", token="agent", body=tar),
        running.ask("POST", f"{path}/log?offset=0", token="agent", body=b"stale\n"),
        running.ask("GET", f"{path}/bundle", token="agent"),
        say(running, f"{path}/end", code=0),
    )
    assert [one.status for one in asked] == [409] * 5
    assert not (running.service.home.job(number) / "results" / "mine-1").exists()
    theirs = f"/v1/agent/leases/{second['id']}"
    assert say(running, f"{theirs}/beat", "agent").status == 409  # It is the lease of `other`.
    assert say(running, f"{theirs}/end", "other", code=1).json() == {"state": "nothing"}


def test_a_state_is_gone_on_with_by_whoever_takes_it_next(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, path = leased(running, place="/srv/a")
    tar = tar_of({"results/mine-1/study.db": database(tmp_path, "one")})
    assert running.ask("PUT", f"{path}/state?sequence=1", token="agent", body=tar).status == 204
    lose(running, monkeypatch)
    elsewhere = take(running, "other", place="/srv/b").json()
    assert (elsewhere["number"], elsewhere["run"], elsewhere["state_run"]) == (number, 2, 1)
    got = running.ask("GET", f"/v1/agent/leases/{elsewhere['id']}/state", token="other")
    assert got.body == tar
    lose(running, monkeypatch)  # Nothing of its own had come from that one.
    again = take(running, place="/srv/c").json()
    assert (again["run"], again["state_run"]) == (3, 1)
    say(running, f"/v1/agent/leases/{again['id']}/end", code=2, said="no \x1b[31mdisk")
    assert running.service.store.get(number, None).said == "no disk"


def test_what_the_runner_has_left_is_gone_on_with_by_an_agent(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, path = leased(running)
    old = tar_of({"results/mine-1/study.db": database(tmp_path, "of the agent")})
    assert running.ask("PUT", f"{path}/state?sequence=1", token="agent", body=old).status == 204
    lose(running, monkeypatch)
    store = running.service.store
    second = store.start_next()  # The runner, in the folder itself.
    assert second is not None and second.number == number
    study = running.service.home.job(number) / "results" / "mine-1" / "study.db"
    study.write_bytes(database(tmp_path, "of the runner"))
    store.cut(number, is_meant=True)
    third = take(running).json()
    assert (third["number"], third["run"], third["state_run"]) == (number, 3, 2)
    state = running.ask("GET", f"/v1/agent/leases/{third['id']}/state", token="agent").body
    with tarfile.open(fileobj=io.BytesIO(state)) as tar:
        member = tar.extractfile("results/mine-1/study.db")
        assert member is not None
        (tmp_path / "got.db").write_bytes(member.read())
    with closing(sqlite3.connect(tmp_path / "got.db")) as got:
        assert got.execute("SELECT study_name FROM studies").fetchall() == [("of the runner",)]
    say(running, f"/v1/agent/leases/{third['id']}/end", code=1)
    # Nothing to go on with: neither is a link that somebody's code has put there.
    number, path = leased(running)
    lose(running, monkeypatch)
    assert store.start_next() is not None
    job = running.service.home.job(number)
    job.mkdir()
    (job / "results").symlink_to(study.parent.parent)
    store.cut(number, is_meant=True)
    fourth = take(running).json()
    assert (fourth["number"], fourth["state_run"]) == (number, 0)
    say(running, f"/v1/agent/leases/{fourth['id']}/end", code=1)


def test_a_state_that_was_cut_short_is_taken_when_it_is_sent_again(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends between the studies and what others go on with, and before the answer."""
    number, path = leased(running)

    def send(text: str, sequence: int) -> int:
        tar = tar_of({"results/mine-1/study.db": database(tmp_path, text)})
        target = f"{path}/state?sequence={sequence}"
        return running.ask("PUT", target, token="agent", body=tar).status

    def broken(*_: object) -> None:
        raise OSError("killed")

    assert send("one", 1) == 204
    with monkeypatch.context() as patch:
        patch.setattr(leases_module, "move_whole", broken)
        assert send("two", 2) >= 500
    assert send("two", 2) == 204
    assert send("two", 2) == 412  # Now it is a replay.
    lose(running, monkeypatch)
    again = take(running).json()
    got = running.ask("GET", f"/v1/agent/leases/{again['id']}/state", token="agent").body
    assert b"two" in got and b"one" not in got
    study = running.service.home.job(number) / "results" / "mine-1" / "study.db"
    assert study.read_bytes() in got
    say(running, f"/v1/agent/leases/{again['id']}/end", code=1)


def test_of_many_who_ask_at_once_one_gets_a_submission(running: Running) -> None:
    """Agents at the server, and beside it a runner: another process with the same database."""
    numbers = {queue(running, args=[str(number)]) for number in range(4)}
    database = Database(running.service.home.database)
    runner = Store(running.service.home, database)
    gate = threading.Barrier(9)
    got: list[tuple[str, str]] = []

    def ask_as_agent(name: str) -> None:
        gate.wait()
        for _ in range(4):
            reply = take(running, name=name)
            assert reply.status in (200, 204), reply.text
            if reply.status == 200:
                got.append((reply.json()["number"], reply.json()["id"]))

    def ask_as_runner() -> None:
        gate.wait()
        while (found := runner.start_next()) is not None:
            got.append((found.number, ""))

    threads = [threading.Thread(target=ask_as_agent, args=(f"a{one}",)) for one in range(8)]
    threads.append(threading.Thread(target=ask_as_runner))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    database.close()
    assert sorted(number for number, _ in got) == sorted(numbers)
    runs = [(one["action"], one["subject"]) for one in running.audited()]
    assert all(runs.count(("run", number)) <= 1 for number in numbers)
    assert {running.service.store.get(one, None).runs for one in numbers} == {1}
    for number, lease in got:
        running.service.store.end(number, "nothing", "", lease=lease)


def test_who_has_got_no_answer_gets_the_same_submission_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = queue(running), queue(running)
    wish = "0123456789abcdef" * 2
    given = take(running, lease=wish)
    assert (given.json()["id"], given.json()["number"]) == (wish, first)
    assert take(running, lease=wish).json() == given.json()
    assert running.service.store.get(first, None).runs == 1
    assert [one["action"] for one in running.audited() if one["subject"] == first].count("run") == 1
    assert take(running, "other", lease=wish).status == 409
    for wrong in ("0" * 31, "0" * 33, "x" * 32, "A" * 32, "0" * 32 + "\n"):
        assert take(running, lease=wrong).status == 422
    assert state(running, second) == "queued"
    # What was lost in the meantime is anybody's: then it is a lease as any other.
    lose(running, monkeypatch)
    again = take(running, lease=wish).json()
    assert (again["id"], again["number"], again["run"]) == (wish, second, 1)
    for path in (f"/v1/agent/leases/{wish}", f"/v1/agent/leases/{take(running).json()['id']}"):
        assert say(running, f"{path}/end", code=1).json() == {"state": "nothing"}


def test_a_lease_that_was_just_given_is_not_lost(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is older than a lease is long, and looks for lost agents at this very moment."""
    number = queue(running)
    leases = running.service.leases
    start_next, lost = running.service.store.start_next, list[str]()

    def look_then(*args: Any, **settings: Any) -> object:
        found = start_next(*args, **settings)
        lost.extend(one.number for one in leases.end_lost())
        return found

    monkeypatch.setattr(leases, "_since_s", leases.clock() - 10 * limits.LEASE_S)
    monkeypatch.setattr(running.service.store, "start_next", look_then)
    path = f"/v1/agent/leases/{take(running).json()['id']}"
    assert (lost, state(running, number)) == ([], "running")
    say(running, f"{path}/end", code=1)


def test_what_was_done_is_in_the_audit_if_and_only_if_it_was_done(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the server is killed in between: there is no in between."""
    number = queue(running)

    def broken(*_: object, **__: object) -> None:
        raise OSError("killed")

    def said() -> list[str]:
        return [one["action"] for one in running.audited() if one["subject"] == number]

    with monkeypatch.context() as patch:
        patch.setattr(running.service.audit, "note", broken)
        with pytest.raises(OSError, match="killed"):
            running.service.leases.take("agent-7", OFFER_NOUN)
    assert (state(running, number), running.service.store.get(number, None).runs) == ("queued", 0)
    lease = take(running).json()["id"]
    with monkeypatch.context() as patch:
        patch.setattr(running.service.audit, "note", broken)
        with pytest.raises(OSError, match="killed"):
            running.service.leases.end(lease, "agent-7", 1)
    assert state(running, number) == "running"
    assert "end" not in said()
    assert say(running, f"/v1/agent/leases/{lease}/end", code=1).json() == {"state": "nothing"}
    assert (said().count("run"), said().count("end")) == (1, 1)


def test_cancelled_given_back_and_lost_too_often(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, path = leased(running)
    running.ask("POST", f"/v1/submissions/{number}/cancel", token="submit")
    assert say(running, f"{path}/beat").json()["is_cancelled"] is True
    assert say(running, f"{path}/end", code=143).json() == {"state": "cancelled"}
    number, path = leased(running)
    for _ in range(6):
        assert say(running, f"{path}/end", code=143, is_meant=True).json() == {"state": "queued"}
        path = f"/v1/agent/leases/{take(running).json()['id']}"
    for _ in range(5):
        assert lose(running, monkeypatch) == [number]
        take(running)
    assert state(running, number) == "failed"
    number, path = leased(running)
    running.ask("POST", f"/v1/submissions/{number}/cancel", token="submit")
    lose(running, monkeypatch)
    assert state(running, number) == "cancelled"


def test_a_restarted_server_gives_every_agent_its_time_anew(running: Running) -> None:
    number, path = leased(running)
    now_s = 1000.0
    leases = running.service.leases
    # As after SIGKILL: what is in memory is gone.
    again = type(leases)(
        home=leases.home,
        database=leases.database,
        store=leases.store,
        audit=leases.audit,
        is_foreign=leases.is_foreign,
        clock=lambda: now_s,
    )
    now_s += limits.LEASE_S
    assert again.end_lost() == []
    assert again.beat(path.rpartition("/")[2], "agent-7").is_cancelled is False
    now_s += limits.LEASE_S
    assert again.end_lost() == []
    assert running.service.store.left_running() == []  # None of them is the runner's.
    now_s += 1.0
    assert [one.number for one in again.end_lost()] == [number]


@pytest.mark.parametrize(
    ("changes", "offer", "is_taken"),
    [
        ({"needs": ["gpu-h100-8"]}, {}, True),
        ({"needs": ["gpu-h100-8", "nvme"]}, {}, False),
        ({"targets": ["cpu:2", "tpu-v5p-8"]}, {"takes": ["cpu:*"]}, False),
        ({"targets": ["cpu:2", "tpu-v5p-8"]}, {"takes": ["cpu:*", "tpu-*"]}, True),
        ({"targets": ["local"]}, {"takes": ["cpu:*"]}, False),
    ],
)
def test_what_suits_whom(
    running: Running, changes: dict[str, Any], offer: dict[str, Any], is_taken: bool
) -> None:
    number = queue(running, **changes)
    found = take(running, **offer)
    assert found.status == (200 if is_taken else 204)
    if is_taken:
        say(running, f"/v1/agent/leases/{found.json()['id']}/end", code=1)
    elif changes.get("needs"):
        # The service's own runner has nothing that it could need.
        assert running.service.store.start_next() is None
    assert state(running, number) == ("nothing" if is_taken else "queued")


@pytest.mark.parametrize(
    "files",
    [
        {"bundle/train.py": b"x"},
        {"results/study.db": b"x"},
        {"search.lock": b"x"},
        {"../results/a/study.db": b"x"},
        # A study that is somebody else's.
        {"results/train-gpu-h100-16-0123abcd/study.db": b"x"},
    ],
)
def test_what_may_be_in_no_state(running: Running, files: dict[str, bytes]) -> None:
    number, path = leased(running)
    reply = running.ask("PUT", f"{path}/state?sequence=1", token="agent", body=tar_of(files))
    assert reply.status == 422, reply.text
    job = running.service.home.job(number)
    assert not job.exists() or list(job.iterdir()) == []
    say(running, f"{path}/end", code=1)


def test_the_name_of_a_study_is_its_submissions_whoever_sends_it_first(
    running: Running, tmp_path: Path
) -> None:
    """Before, an agent that had learnt the name kept the honest one from sending its state."""
    honest, path = leased(running)
    name = f"train-cpu-2-{honest}-1a2b3c4d"
    say(running, f"{path}/end", code=None, is_meant=True)  # The liar gives it back.
    store = running.service.store
    store.cancel(honest, None)
    _, liar = leased(running)
    store.resume(honest, None)
    tar = tar_of({f"results/{name}/study.db": database(tmp_path, "of the liar")})
    target = f"{liar}/state?sequence=1"
    assert running.ask("PUT", target, token="agent", body=tar).status == 422
    found = take(running, "other").json()
    assert found["number"] == honest
    target = f"/v1/agent/leases/{found['id']}/state?sequence=1"
    assert running.ask("PUT", target, token="other", body=tar).status == 204
    # Code of the liar's may make such a folder where it runs: it is not shown.
    stolen = running.service.home.job("0" * 16) / "results" / name
    make_measured(stolen)
    running.service.catalogue.refresh()
    known = running.service.catalogue.get(name)
    assert known is not None and known.folder.parent.parent.name == honest
    for one in (liar, target.partition("/state")[0]):
        say(running, f"{one}/end", "agent" if one == liar else "other", code=1)


def tar_of_folders(count: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(count):
            member = tarfile.TarInfo(f"results/e{number}")
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
    return buffer.getvalue()


@pytest.mark.parametrize("what", ["a journal", "a check", "folders"])
def test_a_state_of_a_liar_costs_nobody_a_file_or_a_turn(
    running: Running, tmp_path: Path, what: str
) -> None:
    """Before, the service's reader played the journal back and deleted the file that it names, and
    the next agent was given the same; 4,000 folders kept that one from sending its own state."""
    number, liar = leased(running)
    name = f"train-cpu-2-{number}-1a2b3c4d"
    study = make_measured(tmp_path / name)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with closing(sqlite3.connect(study / "study.db")) as made:
        made.execute("PRAGMA journal_mode=DELETE").fetchall()
    sound = {f"results/{name}/study.db": (study / "study.db").read_bytes()}
    journal = plant_journal(study / "study.db", victim).read_bytes()
    with closing(sqlite3.connect(tmp_path / "slow.db")) as made:
        made.execute("CREATE TABLE zz (x CHECK (length(hex(zeroblob(x))) > 0))")
    slow = {f"results/{name}/study.db": (tmp_path / "slow.db").read_bytes()}
    tar = {
        "a journal": lambda: tar_of({**sound, f"results/{name}/study.db-journal": journal}),
        "a check": lambda: tar_of(slow),
        "folders": lambda: tar_of_folders(4000),
    }[what]()

    def send(path: str, token: str, sequence: int, tar: bytes) -> int:
        target = f"{path}/state?sequence={sequence}"
        status = running.ask("PUT", target, token=token, body=tar).status
        running.service.catalogue.refresh()
        return status

    answer = send(liar, "agent", 1, tar)
    say(running, f"{liar}/end", code=None, is_meant=True)
    found = take(running, "other").json()
    assert found["number"] == number
    honest = f"/v1/agent/leases/{found['id']}"
    handed = running.ask("GET", f"{honest}/state", token="other").body
    taken = send(honest, "other", 9, tar_of(sound))
    say(running, f"{honest}/end", "other", code=1)
    assert victim.exists()
    assert b"-journal" not in handed
    assert (answer, taken) == (422, 204)


def test_a_name_is_nobodys_only_after_somebody_has_looked(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, for a second or two, no study is known: an agent could take any name."""
    number, path = leased(running)
    catalogue = running.service.catalogue

    def send(name: str, sequence: int) -> Reply:
        tar = tar_of({f"results/{name}/study.db": b""})
        target = f"{path}/state?sequence={sequence}"
        return running.ask("PUT", target, token="agent", body=tar)

    with monkeypatch.context() as begun:
        begun.setattr(catalogues, "LATE_S", 0.05)
        begun.setattr(catalogue, "_is_kept_fresh", True)
        begun.setattr(catalogue, "_looked_s", -math.inf)
        begun.setattr(catalogue, "_known", {})
        for name in ("train-gpu-h100-16-0123abcd", "mine-of-a-start"):
            reply = send(name, 1)
            assert (reply.status, reply.headers.get("retry-after")) == (503, "5"), reply.text
    job = running.service.home.job(number)
    assert not job.exists() or list(job.iterdir()) == []
    assert send("train-gpu-h100-16-0123abcd", 2).status == 422
    assert send("mine-of-a-start", 3).status == 204
    running.service.catalogue.refresh()
    # What is known to be its own needs no look.
    monkeypatch.setattr(catalogues, "LATE_S", 0.05)
    monkeypatch.setattr(catalogue, "_is_kept_fresh", True)
    monkeypatch.setattr(catalogue, "_looked_s", -math.inf)
    assert send("mine-of-a-start", 4).status == 204
    say(running, f"{path}/end", code=1)


def test_scopes_and_bounds(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    number, path = leased(running)
    for token in ("read", "submit", ""):
        status = 403 if token else 401
        assert take(running, token).status == status
        assert say(running, f"{path}/beat", token).status == status
    # An agent sees nothing but what it runs.
    for place in ("/v1/studies", "/v1/submissions", f"/v1/submissions/{number}", "/v1/audit"):
        assert running.ask("GET", place, token="agent").status == 403
    assert submit(running, running.send_bundle(BUNDLE), token="agent").status == 403
    for wrong in (
        {"name": "a/b"},
        {"name": ""},
        {"takes": ["(a*)*b"]},
        {"has": ["x"] * 51},
        {"has": ["a b"]},
        {"cores": "many"},
        {"pid": 3},
    ):
        assert take(running, **wrong).status == 422, wrong
    assert say(running, f"{path}/end", code=1e3).status == 422
    assert say(running, f"{path}/end", code=10**9).status == 422
    for lease in ("x", "0" * 31, "..%2f..", "0" * 32):
        reply = say(running, f"/v1/agent/leases/{lease}/beat")
        assert reply.status in (400, 404, 409), lease
    monkeypatch.setattr(limits, "SEARCH_LOG_BYTES", 10)
    reply = running.ask("POST", f"{path}/log?offset=0", token="agent", body=b"x" * 100)
    assert reply.json() == {"bytes": 10}
    too_much = bytes(limits.REQUEST_BYTES + 1)
    assert running.ask("POST", f"{path}/log?offset=0", token="agent", body=too_much).status == 413
    say(running, f"{path}/end", code=1)
    # What it says every few seconds is not in the audit, what it was refused is.
    done = [(one["who"], one["action"]) for one in running.audited()]
    assert ("agent-7", f"POST {path}/beat") not in done
    assert ("agent-7", "GET /v1/audit") in done


def test_hosts(running: Running) -> None:
    number, path = leased(running)
    (mine,) = [
        one for one in running.ask("GET", "/v1/hosts").json() if one["name"] == "agent-7/gpu-7"
    ]
    assert (mine["kind"], mine["state"], mine["running"]) == ("agent", "there", [number])
    assert (mine["takes"], mine["has"]) == (["*"], ["gpu-h100-8"])
    for one in running.ask("GET", "/v1/hosts", token="read").json():
        assert one["running"] == []
    say(running, f"{path}/end", code=1)
    (mine,) = [
        one for one in running.ask("GET", "/v1/hosts").json() if one["name"] == "agent-7/gpu-7"
    ]
    assert mine["running"] == []


@pytest.mark.parametrize("change", [{"of_a_later_version": True}, {"takes": {"*": 1}}])
def test_an_agent_of_another_version_is_told_in_one_sentence(
    running: Running, change: dict[str, Any]
) -> None:
    """It says something that this service does not know, and gets nothing that it could lose."""
    number = queue(running)
    reply = take(running, **change)
    assert reply.status == 422
    said = reply.json()["detail"]
    assert next(iter(change)) in said and "\n" not in said
    assert running.service.store.get(number, None).state == "queued"
    # A former version said less of itself.
    former = running.ask(
        "POST", "/v1/agent/leases", token="agent", body={"name": "a", "takes": ["*"]}
    )
    assert former.status == 200 and former.json()["number"] == number
