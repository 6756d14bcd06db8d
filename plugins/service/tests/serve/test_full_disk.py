"""A disk without room under a service: each request gets a sentence, nothing that was there is
lost, and it goes on by itself once there is room."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from plugins.service.tests.support.serve_process import ServeProcess
from plugins.service.tests.support.service import Running, order, running_service, tar_of

FILES = {"train.py": b"def build(mesh):\n    raise NotImplementedError\n"}
BUNDLE = tar_of(FILES)
WAIT_S = 300.0


@contextmanager
def full() -> Generator[None]:
    """No file of this process can grow: to what writes it is as if the disk had no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with running_service(tmp_path) as found:
        yield found


def submit(running: Running, digest: str, key: str) -> tuple[int, dict[str, str]]:
    reply = running.ask(
        "POST",
        "/v1/studies",
        token="submit",
        body={"bundle": digest, "order": order()},
        Idempotency_Key=key,
    )
    assert "application/" in reply.headers["content-type"] and "Traceback" not in reply.text
    return reply.status, reply.json()


def test_every_request_gets_a_sentence_and_nothing_is_lost(running: Running) -> None:
    """Before, it was a page `Internal Server Error`, and a traceback in the log for each."""
    digest = running.send_bundle(BUNDLE)
    status, first = submit(running, digest, "first-key")
    assert status == 201
    number = first["number"]
    other = tar_of({**FILES, "data": b"x" * 2**20})
    with full():
        requests = {
            "a bundle": running.ask("PUT", f"/v1/bundles/{'0' * 64}", token="submit", body=other),
            "a submission": submit(running, digest, "second-key"),
            "a cancel": running.ask("POST", f"/v1/submissions/{number}/cancel", token="submit"),
        }
        assert running.ask("GET", f"/v1/submissions/{number}", token="submit").status == 200
        assert running.ask("GET", "/v1/studies", token="read").status == 200
        stranger = running.ask("POST", "/v1/studies", token="amt_of_nobody", body=b"{}")
        assert stranger.status == 401 and "token" in stranger.json()["detail"]
    for what, reply in requests.items():
        status, said = reply if isinstance(reply, tuple) else (reply.status, reply.json())
        assert status == 503, what
        assert said["detail"].startswith("the service cannot write to its disk: "), what
        assert "\n" not in said["detail"] and str(running.service.home.folder) not in str(said)
    assert [one.name for one in (running.service.home.folder / "bundles").iterdir()] == [
        f"{digest}.tar"
    ]
    # What was asked for is done when it is asked for once more, and once.
    assert submit(running, digest, "second-key")[0] == 201
    assert submit(running, digest, "second-key")[0] == 200
    listed = running.ask("GET", "/v1/submissions", token="submit").json()
    assert listed["total"] == 2
    cancelled = running.ask("POST", f"/v1/submissions/{number}/cancel", token="submit")
    assert cancelled.json()["state"] == "cancelled"


@pytest.mark.slow
def test_a_service_whose_disk_is_full_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """The command as a whole: server and runner, also when it is told to end meanwhile."""
    served = ServeProcess(folder=tmp_path)
    try:
        served.start()
        assert served.process is not None
        everybody = [psutil.Process(served.process.pid)]
        everybody += everybody[0].children(recursive=True)
        for one in everybody:
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        headers = {"Content_Type": "application/toml"}
        status, _ = served.ask("PUT", f"/v1/bundles/{'0' * 64}", BUNDLE, **headers)
        assert status == 503
        time.sleep(5.0)  # A runner notes that it is there; that fails.
        assert (
            served.process.poll() is None
            and [one for one in everybody if not one.is_running()] == []
        )
        for one in everybody:
            infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, infinite)
        number = served.send("after-it", FILES)
        end_s = time.monotonic() + WAIT_S
        while served.submission(number)["submission"]["state"] in ("queued", "running"):
            assert time.monotonic() < end_s, served.said()
            time.sleep(0.2)
        assert served.submission(number)["submission"]["state"] == "failed"
        for one in everybody[:1]:
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(WAIT_S) == 0
        assert "Traceback" not in served.said()
    finally:
        served.end()
