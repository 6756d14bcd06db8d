"""A service under load: watchers, lists and a search, on SQLite and on PostgreSQL.

Makes studies (1,000 by default), serves them by `automesh serve` in a process, opens streams of
events (200) and asks for lists (50 a second) for a while, first without and then with a search
beside it on the same machine. What is told: the percentiles of the time from a request to the whole
of its answer, the ratio of the two, and the most memory that the server held. The last line on
stdout is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from automesh.submissions.database import Database
from automesh.submissions.home import open_home
from automesh.submissions.tokens import Tokens
from tests.support.postgres import new_database, postgres_server
from tests.support.processes import free_ports
from tests.support.service import make_measured

_WATCHERS_OF_ONE = 50  # streams of one token
_START_S = 600.0
_QUERIES = (
    "size=50",
    "size=50&page=2",
    "query=train",
    "state=ended&size=200",
    "target=gpu-h100-16",
)
_SCRIPT = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def build(mesh):
    def struct(*spec):
        return jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    return jax.jit(step, donate_argnums=0), (struct(None, "tp"), struct("dp", None))
"""


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
    most_bytes: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def watch_memory(self) -> None:
        """Notes the most memory that the server holds, until the service closes."""
        process = psutil.Process(self.process.pid)
        while not self.closing.wait(0.2):
            with contextlib.suppress(psutil.Error):
                self.most_bytes = max(self.most_bytes, process.memory_info().rss)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def served(folder: Path, load: Load, storage: str) -> Generator[Served]:
    """A service over the studies of a folder, or of a storage, once it has read all of them."""
    home = open_home(folder / "service")
    database = Database(home.database)
    count = 2 + load.watchers // _WATCHERS_OF_ONE
    tokens = [Tokens(database).make(f"user{number}", "read", None) for number in range(count)]
    database.close()
    port = free_ports(1)
    words = ["serve", "--searches=0", f"--home={home.folder}", f"--listen=127.0.0.1:{port}"]
    words += [f"--results={folder / 'results'}", *([f"--storage={storage}"] if storage else [])]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        [sys.executable, "-m", "automesh", *words],
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    one = Served(port=port, process=process, tokens=tokens)
    memory = threading.Thread(target=one.watch_memory, daemon=True)
    memory.start()
    try:
        wait_until_read(one, load.studies)
        yield one
    finally:
        one.closing.set()
        memory.join()
        process.terminate()
        process.wait(60)


def wait_until_read(one: Served, studies: int) -> None:
    """Waits until a service has read all of its studies."""
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, ValueError, KeyError):
            status, body = ask(one, "/v1/studies?state=ended&size=1", one.tokens[0])
            if status == 200 and json.loads(body)["total"] >= studies:
                return
        time.sleep(0.5)
    raise SystemExit("the service has not read all studies in time")


def ask(one: Served, path: str, token: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@contextlib.contextmanager
def watching(one: Served, names: Sequence[str], count: int) -> Generator[list[socket.socket]]:
    """Streams of events that are open while inside; what they say is read and dropped."""
    streams: list[socket.socket] = []
    closing = threading.Event()

    def drain() -> None:
        while not closing.wait(0.2):
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.recv(65536)

    try:
        for number in range(count):
            token = one.tokens[2 + number // _WATCHERS_OF_ONE - 1]
            stream = socket.create_connection(("127.0.0.1", one.port), timeout=60)
            streams.append(stream)
            path = f"/v1/studies/{names[number % len(names)]}/events"
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{one.port}\r\n"
            stream.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
            if b" 200 " not in stream.recv(256):
                raise SystemExit("a stream of events was refused")
            stream.setblocking(False)
        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        yield streams
        closing.set()
        thread.join()
    finally:
        closing.set()
        for stream in streams:
            stream.close()


def asked(one: Served, load: Load) -> Times:
    """Asks for lists at a steady rate, whether or not the ones before were answered."""
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
def searching(folder: Path) -> Generator[None]:
    """A search at work on this machine while inside."""
    place = folder / "searched"
    place.mkdir()
    (place / "train.py").write_text(_SCRIPT)
    words = ["search", "train.py", "--target", "cpu:4", "--budget", "1h"]
    process = subprocess.Popen(
        [sys.executable, "-m", "automesh", *words],
        cwd=place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        if process.poll() is not None:
            say("note: the search has ended before the requests did")
    finally:
        process.terminate()
        process.wait(120)


def measured(folder: Path, load: Load, storage: str) -> dict[str, Any]:
    """What one kind of storage gives."""
    names = [f"train-gpu-h100-16-{number:08x}" for number in range(load.studies)]
    for number, name in enumerate(names):
        make_measured(folder / "results" / name, storage=storage)
        if number % 100 == 99:
            say(f"{number + 1} studies made")
    began_s = time.perf_counter()
    with served(folder, load, storage) as one:
        ready_s = time.perf_counter() - began_s
        say(f"all studies read after {ready_s:.0f} s")
        with watching(one, names, load.watchers):
            alone = asked(one, load)
            say(f"alone: p99 {alone.p99_s * 1e3:.0f} ms")
            with searching(folder):
                time.sleep(min(load.seconds, 20.0))
                beside = asked(one, load)
            say(f"beside a search: p99 {beside.p99_s * 1e3:.0f} ms")
        most_bytes = one.most_bytes
    return {
        "alone": asdict(alone),
        "beside_a_search": asdict(beside),
        "p99_ratio": beside.p99_s / alone.p99_s,
        "all_read_s": ready_s,
        "server_peak_bytes": most_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--watchers", type=int, default=200)
    parser.add_argument("--per-s", type=float, default=50.0, help="requests for lists")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two loads")
    parser.add_argument("--storage", choices=("sqlite", "postgres", "both"), default="both")
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


if __name__ == "__main__":
    main()
