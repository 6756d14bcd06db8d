"""What a service may listen at, under which names it answers, and that it survives SIGKILL."""

from __future__ import annotations

import hashlib
import http.client
import os
import random
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import automesh
from automesh.errors import UsageError
from automesh_service.remote import credentials
from automesh_service.remote.client import open_server
from automesh_service.remote.credentials import leave_word, token_for
from automesh_service.serve import server
from automesh_service.serve.net.addresses import bound, names_of, read_address, tls_context
from automesh_service.serve.net.http_server import EventServer
from automesh_service.serve.server import RunnerOfService, ServeOptions, serve
from automesh_service.serve.service import ServiceSettings, open_service
from automesh_service.submissions.home import open_home
from plugins.service.tests.support.serve_process import START_S, ServeProcess, until
from plugins.service.tests.support.service import make_measured, running_service, tar_of
from tests.e2e.test_readme import block

# `automesh search` refuses it in a second: what is tested is who runs it, and how often.
REFUSED = b"\0"
KILLS = 1


def options(folder: Path, **changes: object) -> ServeOptions:
    fields: dict[str, object] = {
        "home": folder / "service",
        "results": folder / "results",
        "storage": "",
        "listen": "127.0.0.1:1",
        "names": (),
        "certificate": None,
        "key": None,
        "searches": 0,
    }
    return ServeOptions(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", ("127.0.0.1", 8700)),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]", ("::1", 8700)),
        ("[::1]:9", ("::1", 9)),
        ("mesh.example.com", ("mesh.example.com", 8700)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


def test_names() -> None:
    local = names_of("127.0.0.1", 8700, "http", ("Mesh.Example.com",))
    assert set(local) == {
        *("127.0.0.1:8700", "localhost:8700", "[::1]:8700"),
        *("mesh.example.com", "mesh.example.com:8700"),
    }
    assert names_of("10.0.0.1", 443, "https", ()) == ("10.0.0.1", "10.0.0.1:443")


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1:8700", "[::]", "mesh.example.com"])
def test_no_other_address_without_tls(address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in the clear"):
        serve(options(tmp_path, listen=address), print)
    assert not (tmp_path / "service").exists()


def test_no_other_address_without_a_token(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    with pytest.raises(UsageError, match="nobody has a token"):
        serve(options(tmp_path, listen="0.0.0.0:1", certificate=pem, key=pem), print)
    with pytest.raises(UsageError, match="together"):
        serve(options(tmp_path, certificate=pem), print)
    (tmp_path / "other.pem").write_text("no certificate")
    with pytest.raises(UsageError, match="cannot be used"):
        serve(options(tmp_path, certificate=pem, key=tmp_path / "other.pem"), print)


def certificate(folder: Path) -> Path:
    """A certificate of this machine's, signed by itself, with its key in one file."""
    path, key = folder / "mesh.pem", folder / "mesh.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-keyout", str(key), "-out", str(path), "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no openssl to make a certificate with")
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


def test_an_address_that_is_taken_is_said_and_its_service_keeps_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(_: str) -> Path:
        return tmp_path / "state"

    monkeypatch.setattr(credentials.platformdirs, "user_state_path", state)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        leave_word(port, "amt_of_the_other")
        with pytest.raises(UsageError, match="cannot be listened at"):
            serve(options(tmp_path, listen=f"127.0.0.1:{port}"), print)
        assert token_for(port, is_local=True, environ={}) == "amt_of_the_other"
    with pytest.raises(UsageError, match="cannot be listened at"):
        bound("no.such.host.invalid", 1)


def test_a_runner_that_has_just_been_started_ends_with_its_service(tmp_path: Path) -> None:
    """Also before it could hear of it by the database."""
    service = open_service(open_home(tmp_path / "service"), ServiceSettings(results=tmp_path))
    runner = RunnerOfService(service)
    thread = threading.Thread(target=runner.keep_alive)
    thread.start()
    end_s = time.monotonic() + 300
    while runner.process is None:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    service.close()
    thread.join()
    runner.stop(print)
    assert runner.process.poll() is not None
    service.catalogue.close()
    service.database.close()


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real server with a certificate, asked by what training scripts and commands use."""
    pem = certificate(tmp_path)
    context = tls_context(pem, pem)
    make_measured(tmp_path / "results" / "train-gpu-h100-16-0123abcd")
    with running_service(tmp_path, context=context) as running:
        url = f"https://localhost:{running.port}"
        monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", running.tokens["read"])
        rules = f"{url}/v1/studies/train-gpu-h100-16-0123abcd/rules.toml"
        with pytest.raises(UsageError, match="certificate is not trusted"):
            automesh.load(rules)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert automesh.load(rules).rules[0].match == "gpu-h100-16"
        server, _ = open_server(url)
        assert "strict-transport-security" in server.ask("GET", "/v1/me").headers
        with pytest.raises(UsageError):  # Without TLS nothing is said, neither here nor there.
            open_server(f"http://localhost:{running.port}")[0].ask("GET", "/v1/me")
        old = ssl.create_default_context(cafile=str(pem))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            socket.create_connection(("127.0.0.1", running.port), timeout=20) as plain,
            pytest.raises(ssl.SSLError),
        ):
            old.wrap_socket(plain, server_hostname="localhost")


def test_one_service_a_folder(tmp_path: Path) -> None:
    home = open_home(tmp_path / "service")
    with (
        home.lock("server"),
        pytest.raises(UsageError, match="another service uses the folder"),
    ):
        serve(options(tmp_path), print)


def test_a_storage_with_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must not have the password"):
        serve(options(tmp_path, storage="postgresql://me:secret@db/mesh"), print)


def test_any_port_that_is_free_is_the_same_at_all_addresses() -> None:
    sockets = bound("localhost", 0)
    ports = {one.getsockname()[1] for one in sockets}
    for one in sockets:
        one.close()
    assert len(ports) == 1 and ports != {0}


def test_the_port_that_was_free_is_told_and_answers_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials.platformdirs, "user_state_path", lambda _: tmp_path / "state")
    said: list[str] = []
    answered: list[int] = []

    def run(server_: EventServer, sockets: list[socket.socket]) -> None:
        port = sockets[0].getsockname()[1]
        assert f"127.0.0.1:{port}" in server_.service.settings.names
        answered.append(port)

    monkeypatch.setattr(server, "run_server", run)
    serve(options(tmp_path, listen="127.0.0.1:0"), said.append)
    (port,) = answered
    assert port not in (0, 8700)
    assert [f"http://127.0.0.1:{port}" in line for line in said] == [True, True]


def test_options_that_nothing_can_come_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--results: `.*file` is no folder"):
        serve(options(tmp_path, results=tmp_path / "file"), print)
    for searches in (99999, (os.cpu_count() or 1) + 1):
        with pytest.raises(UsageError, match=f"searches at once, not {searches}"):
            serve(options(tmp_path, searches=searches), print)
    with pytest.raises(UsageError, match="no address of a proxy"):
        serve(options(tmp_path, proxies=("proxy.example.com",)), print)
    assert not (tmp_path / "service").exists()


# The whole of it, as processes.


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    found = ServeProcess(folder=tmp_path)
    yield found
    found.end()


def begin_upload(served: ServeProcess, data: bytes) -> http.client.HTTPConnection:
    """Sends the first half of a bundle, and waits until the service has begun to write it."""
    digest = hashlib.sha256(data).hexdigest()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.putrequest("PUT", f"/v1/bundles/{digest}")
    connection.putheader("Authorization", f"Bearer {served.token}")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data[: len(data) // 2])
    drafts = served.home / "bundles"
    until(lambda: list(drafts.glob("*.draft")), 60.0, served.said)
    return connection


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_an_upload(served: ServeProcess) -> None:
    served.start()
    files = {"train.py": REFUSED, "data.bin": random.Random(0).randbytes(2**20)}
    data = tar_of(files)
    upload = begin_upload(served, data)
    served.kill()
    upload.close()
    served.start()
    bundles = served.home / "bundles"
    # Half of it is no bundle, whatever it is called by; and it is sent anew as if nothing had been.
    assert [one.suffix for one in bundles.iterdir()] == [".draft"]
    number = served.send("after-the-kill", files)
    assert served.send("after-the-kill", files) == number
    (kept,) = bundles.glob("*.tar")
    assert kept.read_bytes() == data
    until(
        lambda: served.submission(number)["submission"]["state"] == "failed",
        START_S,
        lambda: f"{served.submission(number)}\n{served.said()}",
    )
    assert served.stop() == 0, served.said()


@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_runs_nothing_twice(served: ServeProcess) -> None:
    served.start()
    numbers = [served.send("submission", {"train.py": REFUSED})]
    for _ in range(KILLS):
        served.kill()
        assert served.ask("GET", "/v1/health")[0] == 0
        served.start()
        again = [served.send("submission", {"train.py": REFUSED})]
        assert again == numbers
    while True:
        states = [served.ask("GET", f"/v1/submissions/{one}")[1]["submission"] for one in numbers]
        if all(one["state"] == "failed" for one in states):
            break
        assert all(one["state"] in ("queued", "running", "failed") for one in states)
        time.sleep(0.2)
    assert [one["runs"] for one in states] == [1]
    assert all("null bytes" in one["said"] for one in states)
    assert served.ask("GET", "/v1/submissions")[1]["total"] == 1
    done = [one["action"] for one in served.ask("GET", "/v1/audit")[1]]
    assert (done.count("run"), done.count("end")) == (1, 1)
    assert served.stop() == 0, served.said()


@pytest.mark.long
def test_twenty_kills_during_a_search_lose_nothing(
    served: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole submission, up to a rule that was measured, under a server that dies all the time."""
    luck = random.Random(7)
    served.start()
    files = {"train.py": block("script").encode()}
    changes = {"targets": ["cpu:2"], "budget": "10m", "top": 1}
    number = served.send("whole-submission", files, **changes)
    for _ in range(20):
        time.sleep(luck.uniform(0.0, 2.0))
        served.kill()
        served.start()
        assert served.send("whole-submission", files, **changes) == number
    end_s = time.monotonic() + 1500
    while True:
        found = served.ask("GET", f"/v1/submissions/{number}")[1]
        if found["submission"]["state"] not in ("queued", "running"):
            break
        assert time.monotonic() < end_s
        time.sleep(1.0)
    assert found["submission"]["state"] == "found", found
    assert found["submission"]["runs"] == 1
    assert served.ask("GET", "/v1/submissions")[1]["total"] == 1
    (name,) = found["studies"]
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", served.token)
    rules = automesh.load(f"{served.url}/v1/studies/{name}/rules.toml")
    (rule,) = rules.rules
    assert (rule.match, rule.evidence.kind) == ("cpu-2", "measured")
    done = [one["action"] for one in served.ask("GET", "/v1/audit")[1]]
    assert (done.count("run"), done.count("end")) == (1, 1)
    assert served.stop() == 0, served.said()
