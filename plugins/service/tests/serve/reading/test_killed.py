"""A whole service whose reader is killed again and again while it is asked, and then itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from plugins.service.tests.support.serve_process import START_S, ServeProcess, until
from plugins.service.tests.support.service import make_measured

NAMES = tuple(f"train-gpu-h100-16-{number}" for number in range(3))
KILLS = 2


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    for name in NAMES:
        make_measured(tmp_path / "results" / name)
    found = ServeProcess(folder=tmp_path, options=("--agents-only",))
    yield found
    found.end()


def reader_of(served: ServeProcess) -> psutil.Process | None:
    """The process that reads studies for a server; None while there is none."""
    assert served.process is not None
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(served.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "automesh_service.serve.reading.process" in one.cmdline():
                    return one
    return None


def asked(served: ServeProcess, path: str) -> tuple[int, str, bytes]:
    """Status, `Retry-After` and body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=START_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {served.token}"})
        reply = connection.getresponse()
        return reply.status, reply.headers.get("Retry-After", ""), reply.read()


def total(served: ServeProcess) -> int:
    status, _, body = asked(served, "/v1/studies?state=ended")
    return json.loads(body)["total"] if status == 200 else -1


@pytest.mark.slow
def test_a_service_whose_reader_is_killed_goes_on(served: ServeProcess) -> None:
    served.start()
    until(lambda: total(served) == len(NAMES), START_S, served.said)
    for number in range(KILLS):
        reader = reader_of(served)
        assert reader is not None
        # Stopped first: what is asked now is asked of a process that dies before it answers.
        reader.send_signal(signal.SIGSTOP)
        make_measured(served.folder / "results" / NAMES[0], step_s=0.125 * (number + 1))
        os.kill(reader.pid, signal.SIGKILL)
        for path in ("/v1/studies", f"/v1/studies/{NAMES[1]}/table.txt"):
            status, after, body = asked(served, path)
            assert (status == 200) or (status == 503 and after), (status, body)
            assert b"Traceback" not in body

        def is_read(step_s: float = 0.125 * (number + 1)) -> bool:
            status, _, body = asked(served, f"/v1/studies/{NAMES[0]}")
            return status == 200 and json.loads(body)["study"]["step_s"] == step_s

        until(is_read, START_S, served.said)
        until(lambda: total(served) == len(NAMES), START_S, served.said)
        assert reader_of(served) is not None
    assert "Traceback" not in served.said()
    last = reader_of(served)
    assert last is not None
    served.kill()
    end_s = time.monotonic() + START_S
    while last.is_running() and last.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.05)
