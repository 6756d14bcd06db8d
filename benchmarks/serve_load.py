"""A service under load: watchers, lists and a search, on SQLite and on PostgreSQL.

Makes studies (1,000 by default) and serves them by `automesh serve` in a process. Lists are asked
for in three ways, each for a while:

* quiet: 10 a second, nobody watches, nothing runs;
* watched: 50 a second, beside 200 streams of events, each of a submission that waits: those of
  studies that have ended are ended by the service after some seconds;
* searched: the same while a search runs on this machine, whose study is one of the service, and
  whom a quarter of the streams follow.

What is told: percentiles of the time from a request to the whole of its answer, the ratios of the
third way to the other two, how many streams were open at the end, the memory of the server with its
processes at the end of each way, half-way through the last one, and at its highest, and the seconds
of a processor that it and the process that reads studies have used in each way. With `--check` the
exit code is 1 if something is not as it has to be, in sentences on stderr. The last line on stdout
is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import selectors
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from automesh_service.submissions.database import Database
from automesh_service.submissions.home import open_home
from automesh_service.submissions.tokens import Tokens
from plugins.service.tests.support.service import SCRIPT, make_measured, order, tar_of
from tests.support.paths import ROOT
from tests.support.postgres import new_database, postgres_server
from tests.support.processes import free_ports

LIST_P99_S = 0.3
"""What a list may take while a search runs."""
GROWN_BYTES = 32 * 2**20
"""By which the server may grow in the second half of the last load: what it holds for a stream, a
request or a study it has long had by then."""
_WATCHERS_OF_ONE = 50  # streams of one token
_LAST_CHUNK = b"0\r\n\r\n"
_QUIET_PER_S = 10.0
_SEARCHED_SHARE = 4  # one in so many streams follows the search
_START_S = 600.0
_SEARCH_S = 600.0  # until a search on a busy machine has a study
_QUERIES = (
    "size=50",
    "size=50&page=2",
    "query=train",
    "state=ended&size=200",
    "target=gpu-h100-16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a service."""

    studies: int
    watchers: int
    per_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds from a request to the whole of its answer."""

    requests: int
    failed: int
    p50_s: float
    p99_s: float
    worst_s: float


@dataclass(kw_only=True)
class Served:
    """A service in a process of its own."""

    port: int
    process: subprocess.Popen[bytes]
    tokens: list[str]
    log: Path
    most_bytes: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def held_bytes(self) -> int:
        """Memory that the server and its processes hold now."""
        server = psutil.Process(self.process.pid)
        held = server.memory_info().rss
        for one in server.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # It may have ended just now.
                held += one.memory_info().rss
        return held

    @property
    def cpu_s(self) -> dict[str, float]:
        """Seconds of a processor that the server has used by now, and those of its processes that
        are there: the one that reads studies."""
        server = psutil.Process(self.process.pid)
        used = {"server": sum(server.cpu_times()[:2]), "reader": 0.0}
        for one in server.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used["reader"] += sum(one.cpu_times()[:2])
        return used

    def watch_memory(self) -> None:
        """Notes the most memory that the server holds, until the service closes."""
        while not self.closing.wait(0.2):
            with contextlib.suppress(psutil.Error):
                self.most_bytes = max(self.most_bytes, self.held_bytes)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def served(folder: Path, load: Load, storage: str) -> Generator[Served]:
    """A service over the studies of a folder, or of a storage, once it has read all of them."""
    home = open_home(folder / "service")
    database = Database(home.database)
    count = max(2, -(-load.watchers // _WATCHERS_OF_ONE))
    tokens = [Tokens(database).make(f"user{number}", "submit", None) for number in range(count)]
    database.close()
    port = free_ports(1)
    # No agent will come: what is submitted waits, and who watches it is not sent away.
    words = ["serve", "--agents-only", f"--home={home.folder}", f"--listen=127.0.0.1:{port}"]
    words += [f"--results={folder / 'results'}", *([f"--storage={storage}"] if storage else [])]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "automesh", *words], stdout=out, stderr=out, env=environment
        )
    one = Served(port=port, process=process, tokens=tokens, log=log)
    memory = threading.Thread(target=one.watch_memory, daemon=True)
    memory.start()
    try:
        wait_until_read(one, load.studies)
        yield one
    finally:
        one.closing.set()
        memory.join()
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of ours, by force if it does not listen."""
    process.terminate()
    try:
        process.wait(180)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_read(one: Served, studies: int) -> None:
    """Waits until a service has read all of its studies."""
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s and one.process.poll() is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            status, body = ask(one, "/v1/studies?state=ended&size=1", one.tokens[0])
            if status == 200 and json.loads(body)["total"] >= studies:
                return
        time.sleep(0.5)
    said = one.log.read_text(errors="replace")[-2000:]
    raise SystemExit(f"the service has not read all studies within {_START_S:.0f} s: {said}")


def ask(
    one: Served,
    path: str,
    token: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
    try:
        sent = {"Authorization": f"Bearer {token}", **(headers or {})}
        connection.request(method, path, body=body, headers=sent)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def submitted(one: Served, token: str) -> str:
    """Submits a search that nobody will run; the path of its events."""
    data = tar_of({"train.py": SCRIPT})
    digest = hashlib.sha256(data).hexdigest()
    status, _ = ask(one, f"/v1/bundles/{digest}", token, method="PUT", body=data)
    body = json.dumps({"bundle": digest, "order": order()}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": "serve-load"}
    if status == 201:
        status, said = ask(one, "/v1/studies", token, method="POST", body=body, headers=headers)
        if status in (200, 201):
            return f"/v1/submissions/{json.loads(said)['number']}/events"
    raise SystemExit(f"a submission was refused with status {status}")


@dataclass(kw_only=True)
class Watchers:
    """Streams of events, read by a thread; what they say is counted and dropped.

    Attributes:
      open: streams that the server has not ended.
      received_bytes: of all of them.
    """

    open: int = 0
    received_bytes: int = 0
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _closing: threading.Event = field(default_factory=threading.Event)

    def add(self, stream: socket.socket) -> None:
        """Takes a stream that has begun."""
        stream.setblocking(False)
        self._selector.register(stream, selectors.EVENT_READ)
        self.open += 1

    def drain(self) -> None:
        """Reads until `close`."""
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                try:
                    data = stream.recv(65536)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                self.received_bytes += len(data)
                # The server may keep the connection of a stream that it has ended.
                if not data or data == _LAST_CHUNK or data.endswith(b"\r\n" + _LAST_CHUNK):
                    self._selector.unregister(stream)
                    self.open -= 1

    def close(self) -> None:
        self._closing.set()


@contextlib.contextmanager
def watching(one: Served, paths: Sequence[tuple[str, str]]) -> Generator[Watchers]:
    """Streams of events that are open while inside.

    Args:
      paths: of each stream its path and a token.
    """
    watchers = Watchers()
    thread = threading.Thread(target=watchers.drain, daemon=True)
    with contextlib.ExitStack() as stack:
        for path, token in paths:
            stream = socket.create_connection(("127.0.0.1", one.port), timeout=60)
            stack.enter_context(stream)
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{one.port}\r\n"
            stream.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
            said = stream.recv(256)
            if b" 200 " not in said:
                raise SystemExit(f"a stream of events was refused: {said[:100]!r}")
            watchers.add(stream)
        thread.start()
        try:
            yield watchers
        finally:
            watchers.close()
            thread.join()


def asked(one: Served, load: Load) -> Times:
    """Asks for lists at a steady rate, whether or not the ones before were answered.

    Args:
      load: its `per_s` and `seconds`.
    """
    taken_s: list[float] = []
    failed = 0
    lock = threading.Lock()

    def send(query: str, token: str) -> None:
        nonlocal failed
        began_s = time.perf_counter()
        try:
            status, _ = ask(one, f"/v1/studies?{query}", token)
        except (OSError, http.client.HTTPException):
            status = 0
        took_s = time.perf_counter() - began_s
        with lock:
            taken_s.append(took_s)
            failed += status != 200

    threads: list[threading.Thread] = []
    began_s = time.perf_counter()
    for number in range(round(load.per_s * load.seconds)):
        due_s = began_s + number / load.per_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        query = _QUERIES[number % len(_QUERIES)]
        # Of several users: one token alone may ask about as often as all of them do here.
        token = one.tokens[number % len(one.tokens)]
        thread = threading.Thread(target=send, args=(query, token))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    cuts = statistics.quantiles(taken_s, n=100, method="inclusive")
    return Times(
        requests=len(taken_s),
        failed=failed,
        p50_s=cuts[49],
        p99_s=cuts[98],
        worst_s=max(taken_s),
    )


@contextlib.contextmanager
def searching(one: Served, folder: Path, storage: str) -> Generator[str]:
    """A search at work on this machine while inside; yields the name of its study, which is one of
    the service's."""
    script = ROOT / "examples" / "dense_lm.py"
    words = ["search", str(script), "--target", "cpu:8", "--space", "dense_lm", "--budget", "2h"]
    words += [f"--results={folder / 'results'}", f"--rules={folder / 'rules.toml'}"]
    words += [f"--storage={storage}"] if storage else []
    log = folder / "search.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "automesh", *words],
            cwd=folder,
            stdout=out,
            stderr=out,
        )
    try:
        yield wait_for_study(one, process, log)
        if process.poll() is not None:
            raise SystemExit(f"the search has ended before the requests did: {log.read_text()}")
    finally:
        end(process)


def wait_for_study(one: Served, process: subprocess.Popen[bytes], log: Path) -> str:
    """The name of the study that a search has begun, once the service shows that it runs."""
    end_s = time.monotonic() + _SEARCH_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            _, body = ask(one, "/v1/studies?state=running&size=1", one.tokens[0])
            found = json.loads(body)["studies"]
            if found:
                return str(found[0]["name"])
        time.sleep(0.5)
    raise SystemExit(f"the search has no study: {log.read_text()}")


def make_studies(folder: Path, names: Sequence[str], storage: str) -> None:
    """Studies that have ended; in files, the first one under other names, which takes less time."""
    first, *others = names
    make_measured(folder / first, storage=storage)
    for number, name in enumerate(others, start=2):
        if storage:
            make_measured(folder / name, storage=storage)
        else:
            shutil.copytree(folder / first, folder / name)
            with contextlib.closing(sqlite3.connect(folder / name / "study.db")) as copy, copy:
                renamed = "UPDATE studies SET study_name = replace(study_name, ?, ?)"
                copy.execute(renamed, (first, name))
        if number % 100 == 0:
            say(f"{number} studies made")


def measured(folder: Path, load: Load, storage: str) -> dict[str, Any]:
    """What one kind of storage gives."""
    names = [f"train-gpu-h100-16-{number:08x}" for number in range(load.studies)]
    make_studies(folder / "results", names, storage)
    began_s = time.perf_counter()
    with served(folder, load, storage) as one:
        ready_s = time.perf_counter() - began_s
        held, cpu_s = {"ready": one.held_bytes}, {"ready": one.cpu_s}
        say(f"all studies read after {ready_s:.0f} s")
        quiet = asked(one, replace(load, per_s=min(_QUIET_PER_S, load.per_s)))
        held["quiet"], cpu_s["quiet"] = one.held_bytes, one.cpu_s
        say(f"quiet: p99 {quiet.p99_s * 1e3:.0f} ms")
        waiting = [(submitted(one, token), token) for token in one.tokens]
        paths = [waiting[number // _WATCHERS_OF_ONE] for number in range(load.watchers)]
        with watching(one, paths) as watchers:
            watched = asked(one, load)
            held["watched"], cpu_s["watched"] = one.held_bytes, one.cpu_s
            left = {"watched": watchers.open}
        say(f"watched: p99 {watched.p99_s * 1e3:.0f} ms, {left['watched']} streams left")
        with searching(one, folder, storage) as study:
            cpu_s["searching"] = one.cpu_s
            for number in range(0, len(paths), _SEARCHED_SHARE):
                paths[number] = (f"/v1/studies/{study}/events", paths[number][1])
            with watching(one, paths) as watchers:
                half = threading.Timer(load.seconds / 2, lambda: held.update(half=one.held_bytes))
                half.start()
                searched = asked(one, load)
                half.join()
                held["searched"], cpu_s["searched"] = one.held_bytes, one.cpu_s
                left["searched"] = watchers.open
                received_bytes = watchers.received_bytes
        say(f"searched: p99 {searched.p99_s * 1e3:.0f} ms, {left['searched']} streams left")
        held["most"] = max(one.most_bytes, *held.values())
    return {
        "quiet": asdict(quiet),
        "watched": asdict(watched),
        "searched": asdict(searched),
        "p99_searched_to_quiet": searched.p99_s / quiet.p99_s,
        "p99_searched_to_watched": searched.p99_s / watched.p99_s,
        "streams_left": left,
        "streams_received_bytes": received_bytes,
        "all_read_s": ready_s,
        "server_bytes": held,
        "cpu_s": {
            way: {who: cpu_s[way][who] - cpu_s[before][who] for who in cpu_s[way]}
            for before, way in (("ready", "quiet"), ("quiet", "watched"), ("searching", "searched"))
        },
    }


def faults_of(name: str, found: Mapping[str, Any], load: Load) -> list[str]:
    """What is not as it has to be, a sentence each.

    Args:
      name: of the storage.
      found: as `measured` returns it.
    """
    faults: list[str] = []
    p99_s, held = found["searched"]["p99_s"], found["server_bytes"]
    if p99_s >= LIST_P99_S:
        faults.append(f"a list took {p99_s * 1e3:.0f} ms (p99) while a search ran")
    for way in ("quiet", "watched", "searched"):
        if found[way]["failed"]:
            faults.append(f"{found[way]['failed']} requests failed ({way})")
    for way, left in found["streams_left"].items():
        if left < load.watchers:
            faults.append(f"{load.watchers - left} streams were ended ({way})")
    grown = held["searched"] - held["half"]
    if grown > GROWN_BYTES:
        faults.append(f"the server grew by {grown / 2**20:.0f} MiB in the last half of the load")
    return [f"{name}: {one}" for one in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--watchers", type=int, default=200)
    parser.add_argument("--per-s", type=float, default=50.0, help="requests for lists")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the three ways")
    parser.add_argument("--storage", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--check", action="store_true", help="exit code 1 if it is not as it must")
    given = parser.parse_args()
    load = Load(
        studies=given.studies, watchers=given.watchers, per_s=given.per_s, seconds=given.seconds
    )
    found: dict[str, Any] = {"load": asdict(load), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        if given.storage in ("sqlite", "both"):
            found["sqlite"] = measured(Path(name) / "sqlite", load, "")
        if given.storage in ("postgres", "both"):
            url = new_database(stack.enter_context(postgres_server()))
            found["postgres"] = measured(Path(name) / "postgres", load, url)
    print(json.dumps(found))
    kinds = [one for one in ("sqlite", "postgres") if one in found]
    faults = [fault for one in kinds for fault in faults_of(one, found[one], load)]
    for fault in faults:
        say(f"fault: {fault}")
    if given.check and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
