"""Floods from one address without a token: others are answered meanwhile."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from automesh import limits
from automesh_service.serve.limiter import Limiter
from automesh_service.serve.net.addresses import tls_context
from automesh_service.serve.net.door import Door
from plugins.service.tests.serve.test_attacks import head, raw
from plugins.service.tests.serve.test_server import certificate
from plugins.service.tests.support.serve_process import ServeProcess
from plugins.service.tests.support.service import Running, running_service

MOST = 100
HALF = b"GET / HTTP/1.1\r\nX: "
BODY = b"POST /v1/studies HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 100000\r\n\r\nx"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("few"), connections=MOST) as running:
        yield running


@contextlib.contextmanager
def flood(port: int, data: bytes, count: int) -> Generator[list[socket.socket]]:
    """Connections that send something and then wait."""
    with contextlib.ExitStack() as stack:
        found: list[socket.socket] = []
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), timeout=20)
            found.append(stack.enter_context(one))
            with contextlib.suppress(OSError):  # It may be closed for another one already.
                one.sendall(data)
        yield found


def answered(one: socket.socket) -> bytes:
    """One answer of JSON, to its end."""
    data = b""
    while not data.endswith(b"}"):
        data += one.recv(65536)
    return data


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _nobody_was_refused_before(few: Running) -> None:
    object.__setattr__(few.service, "limiter", Limiter())


@pytest.mark.slow
@pytest.mark.parametrize("data", [HALF, b"", BODY], ids=["heads", "nothing", "bodies"])
def test_half_sent_requests_of_strangers_push_each_other_out(few: Running, data: bytes) -> None:
    data = data % few.port if b"%d" in data else data
    watched = head(few, "GET", "/v1/audit")
    with contextlib.ExitStack() as stack:
        friend = socket.create_connection(("127.0.0.1", few.port), timeout=20)
        stack.enter_context(friend).sendall(watched)
        assert answered(friend).startswith(b"HTTP/1.1 403 ")  # Known, though it may not do that.
        all_of_them = stack.enter_context(flood(few.port, data, 5 * MOST))
        for _ in range(5):
            began_s = time.monotonic()
            assert few.ask("GET", "/v1/me").status == 200
            assert time.monotonic() - began_s < 30  # Seconds on a machine with other work.
        end_s = time.monotonic() + 300
        while sum(map(is_open, all_of_them)) > MOST:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert len(few.service.connections) <= MOST
        friend.sendall(watched)
        assert answered(friend).startswith(b"HTTP/1.1 403 ")


def test_others_are_answered_during_a_storm_of_connections(few: Running) -> None:
    is_over = threading.Event()

    def storm() -> None:
        while not is_over.is_set():
            with flood(few.port, HALF, 20):
                pass

    threads = [threading.Thread(target=storm) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        codes: list[int] = []
        for _ in range(20):
            with contextlib.suppress(OSError):
                codes.append(few.ask("GET", "/v1/me").status)
    finally:
        is_over.set()
        for one in threads:
            one.join()
    assert codes.count(200) >= 18
    until_empty(few)


def until_empty(running: Running) -> None:
    end_s = time.monotonic() + 300
    while len(running.service.connections):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_handshakes_that_do_not_end_are_counted_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    pem = certificate(tmp_path)
    context = tls_context(pem, pem)
    with (
        running_service(tmp_path, context=context, connections=MOST) as running,
        flood(running.port, b"\x16\x03\x01", 2 * MOST) as all_of_them,
    ):
        assert 0 < len(running.service.connections) <= MOST
        until_empty(running)
        assert not any(map(is_open, all_of_them))


def test_who_comes_while_the_service_itself_is_held_up_is_answered(
    few: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, on a machine with other work: one that was accepted when the process had to wait for
    a processor for ten seconds was closed without an answer."""
    accept, stalls = Door.accept, [0.7]

    def accept_and_wait(door: Door) -> tuple[socket.socket, Any]:
        taken = accept(door)
        time.sleep(stalls.pop() if stalls else 0.0)
        return taken

    monkeypatch.setattr(limits, "HEAD_S", 0.3)
    monkeypatch.setattr(Door, "accept", accept_and_wait)
    assert few.ask("GET", "/v1/me").status == 200
    assert not stalls


def test_an_answer_that_nobody_takes_is_not_kept_for_ever(
    few: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_STALL_S", 0.3)
    bundle = few.send_bundle(bytes(10240))
    few.service.home.bundle(bundle).write_bytes(bytes(2**25))
    with socket.create_connection(("127.0.0.1", few.port), timeout=20) as slow:
        slow.sendall(head(few, "GET", f"/v1/bundles/{bundle}"))
        until_empty(few)


def test_a_body_is_not_read_before_its_sender_is_known(few: Running) -> None:
    """Else a stranger keeps a connection for as long as a body may take."""
    began_s = time.monotonic()
    assert raw(few, BODY % few.port).startswith(b"HTTP/1.1 401 ")
    assert time.monotonic() - began_s < limits.BODY_S


SMUGGLED = (
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 0"),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: identity",),
    ("Transfer-Encoding: gzip, chunked",),
    ("Content-Length: 5", "Content-Length: 6"),
    ("Host: 127.0.0.1",),
    ("Authorization: Bearer x",),
    ("Origin: http://a", "Origin: http://b"),
)


@pytest.mark.parametrize("lines", SMUGGLED, ids=range(len(SMUGGLED)))
def test_what_a_proxy_may_take_for_something_else_is_refused(
    few: Running, lines: tuple[str, ...]
) -> None:
    body = b"0\r\n\r\nGET /v1/me HTTP/1.1\r\n\r\n"
    answer = raw(few, head(few, "POST", "/v1/studies", *lines), body)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ", b"HTTP/1.1 403 ")), answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_chunks_of_a_program_that_does_not_know_them_are_refused(few: Running) -> None:
    whole = head(few, "POST", "/v1/studies", "Transfer-Encoding: chunked")
    answer = raw(few, whole.replace(b"HTTP/1.1", b"HTTP/1.0"), b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow
def test_a_service_with_few_descriptors(tmp_path: Path) -> None:
    """As a process, where `ulimit -n` is 1024: 1,100 half-sent heads, then none left at all."""
    served = ServeProcess(
        folder=tmp_path,
        options=("--searches", "0"),
        before=("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        served.start()
        assert served.process is not None
        server = psutil.Process(served.process.pid)
        with flood(served.port, HALF, 1100):
            for _ in range(5):
                assert served.ask("GET", "/v1/me")[0] == 200
            assert server.num_fds() < 800
        if sys.platform == "linux":
            before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (server.num_fds() + 2, before[1]))
            spent_s, began_s = sum(server.cpu_times()[:2]), time.monotonic()
            with flood(served.port, HALF, 300):
                time.sleep(2.0)
            took_s = time.monotonic() - began_s
            assert sum(server.cpu_times()[:2]) - spent_s < 0.7 * took_s
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
            served.wait_until_healthy()
        assert served.ask("GET", "/v1/me")[0] == 200
        assert (tmp_path / "serve.log").stat().st_size < 50_000, served.said()
        assert served.stop() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        served.end()
