"""Anybody may listen at the address of a service: whatever comes back is one sentence at most."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import automesh
from automesh import limits
from automesh.errors import AutomeshError
from automesh_service.remote import patience, submit
from automesh_service.remote.agent import Agent, AgentOptions, Beats
from automesh_service.remote.client import Server, open_server
from automesh_service.remote.patience import Patience, Unreachable
from automesh_service.submissions.home import open_home
from automesh_service.submissions.order import Order
from tests.support.cases import bad_inputs_run
from tests.support.processes import free_ports

ESC = "\x1b]0;pwn\x07\x1b[2J\x1b[31mEVIL\u202e\x9b31m"
TOKEN = "amt_SECRET"
NUMBER = "0123456789abcdef"
ORDER = Order(entry="train.py", targets=("cpu:2",))
RULE = 'schema = 1\naxes = ["dp"]\n\n[[rule]]\nmatch = "cpu-2"\nici = { dp = 2 }\n'
Send = Callable[[socket.socket], None]


def http(
    body: object = b"{}", *, status: int = 200, kind: str = "application/json", more: str = ""
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    )
    return head.encode() + data


@dataclass(kw_only=True)
class Evil:
    """Sends what it is told to, whatever it is asked for.

    Attributes:
      send: the answer, or what sends it.
      asked: requests that have come.
    """

    listening: socket.socket
    send: bytes | Send = b""
    asked: list[bytes] = field(default_factory=list[bytes])
    is_over: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def serve(self) -> None:
        while not self.is_over:
            with suppress(OSError):
                taken, _ = self.listening.accept()
                threading.Thread(target=self._answer, args=(taken,), daemon=True).start()

    def _answer(self, taken: socket.socket) -> None:
        with taken, suppress(OSError):
            taken.settimeout(10)
            head = b""
            while b"\r\n\r\n" not in head and (data := taken.recv(2**16)):
                head += data
                if head.startswith(b"\x16\x03"):  # A greeting of TLS.
                    break
            self.asked.append(head)
            if found := re.search(rb"(?i)content-length: (\d+)", head):
                left = int(found[1]) - len(head.partition(b"\r\n\r\n")[2])
                while left > 0 and (data := taken.recv(2**16)):
                    left -= len(data)
            if isinstance(self.send, bytes):
                taken.sendall(self.send)
            else:
                self.send(taken)


@pytest.fixture
def evil(monkeypatch: pytest.MonkeyPatch) -> Generator[Evil]:
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", TOKEN)
    monkeypatch.setattr(patience, "_PAUSE_S", 0.02)
    monkeypatch.setattr(submit, "_PAUSE_S", 0.02)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(0.05)
        made = Evil(listening=listening)
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        yield made
        made.is_over = True
        thread.join(10)


def server_of(evil: Evil, said: list[str] | None = None) -> Server:
    return open_server(evil.url, (said if said is not None else []).append)[0]


def agent_of(evil: Evil, folder: Path) -> Agent:
    options = AgentOptions(name="a", takes=("*",), has=(), folder=folder / "agent")
    home = open_home(options.folder)
    return Agent(server=server_of(evil), home=home, options=options, say=lambda _: None)


def asks(evil: Evil, folder: Path) -> dict[str, Callable[[], object]]:
    """All that commands, scripts and agents ask of a service."""
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text("")
    server, rules = server_of(evil), folder / "mesh_rules.toml"
    return {
        "submit": lambda: submit.submit(server, ORDER, project),
        "follow": lambda: submit.follow(server, NUMBER, lambda _: None),
        "tables": lambda: submit.tables(server, ["x"], width=80, top=8),
        "json": lambda: submit.result_json(server, ["x"]),
        "rules": lambda: submit.take_rules(server, ["x"], rules, targets=["cpu:2"]),
        "load": lambda: automesh.load(f"{evil.url}/v1/studies/x/rules.toml"),
        "take": lambda: agent_of(evil, folder).take(),
    }


def refused(act: Callable[[], object]) -> AutomeshError:
    began_s = time.monotonic()
    with pytest.raises(AutomeshError) as caught:
        act()
    assert time.monotonic() - began_s < 30
    error = caught.value
    said = str(error)
    assert "\x1b" not in said and "\x07" not in said and "\x9b" not in said
    assert "\u202e" not in said and TOKEN not in said
    assert "\n" not in error.message and len(error.message) < 2_100
    return error


def deep(count: int) -> bytes:
    return b"[" * count


WRONG: dict[str, bytes] = {
    "null": http(b"null"),
    "list": http([]),
    "number": http(b"3"),
    "text": http("found"),
    "no keys": http({}),
    "other types": http(
        {
            "number": 3,
            "state": ["found"],
            "submission": 3,
            "studies": {},
            "study": None,
            "rule": 3,
            "missing": [],
        }
    ),
    "texts for numbers": http({"submission": {"state": "found", "said": 3}, "studies": "abc"}),
    "a path for a number": http({"number": f"../../../etc/{ESC}", "state": "queued"}, status=201),
    "a state of its own": http(
        {
            "number": NUMBER,
            "state": ESC,
            "submission": {"state": ESC, "said": ""},
            "studies": [],
            "study": {"state": ESC, "target": ESC},
            "rule": "",
            "missing": "",
        }
    ),
    "deep": http(deep(10**6)),
    "deep and whole": http(b"[" * 500 + b"]" * 500),
    "half": http(b'{"number": "0123'),
    "NaN": http(b"NaN"),
    "digits": http(b"9" * 10**5),
    "not UTF-8": http(b'{"number": "\xff"}'),
    "a page": http(b"<html>", kind="text/html"),
    "packed": http(b"\x1f\x8b", more="Content-Encoding: gzip\r\n"),
    "a sentence": http({"detail": f"{ESC}\n{ESC}" * 100, "hint": f"{ESC}\nerror: x"}, status=422),
    "no sentence": http([[ESC]], status=500),
    "another address": http(status=302, more="Location: http://127.0.0.1:1/steal\r\n"),
    "a file": http(status=302, more="Location: file:///etc/passwd\r\n"),
    "other words": f"\x00\xff{ESC}\r\n\r\n".encode(),
    "a line without an end": b"HTTP/1.1 200 " + b"x" * 2**20,
    "many headers": b"HTTP/1.1 200 X\r\n" + b"X-A: 1\r\n" * 300 + b"\r\n",
    "other bytes of TLS": b"\x15\x03\x01\x00\x02\x02\x46",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_a_sentence(
    evil: Evil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before, `null` and `[]` were tracebacks of `automesh submit`."""
    monkeypatch.setattr(limits, "REMOTE_FIRST_S", 0.0)
    monkeypatch.setattr(limits, "REMOTE_BACK_S", 0.0)
    evil.send = WRONG[name]
    for what, act in asks(evil, tmp_path).items():
        error = refused_or_waits(act, what)
        assert error is None or error.message, what
    assert not any(b"/steal" in one for one in evil.asked)
    assert not (tmp_path / "mesh_rules.toml").exists()


def refused_or_waits(act: Callable[[], object], what: str) -> AutomeshError | None:
    """An agent goes on asking while nobody answers it."""
    if what != "take":
        return refused(act)
    with suppress(AssertionError, pytest.fail.Exception):
        return refused(act)
    return None


def endless(part: bytes, *, head: bytes = b"", pause_s: float = 0.0) -> Send:
    """Sends a part again and again."""

    def send(taken: socket.socket) -> None:
        taken.sendall(head)
        end_s = time.monotonic() + 40
        while time.monotonic() < end_s:
            taken.sendall(part)
            time.sleep(pause_s)

    return send


CHUNKED = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, Send] = {
    "bytes": endless(b"x" * 2**16, head=b"HTTP/1.1 200 X\r\nContent-Length: 99999999999\r\n\r\n"),
    "bytes until the end": endless(b"x" * 2**16, head=b"HTTP/1.1 200 X\r\n\r\n"),
    "chunks": endless(b"1\r\nx\r\n" * 2**12, head=CHUNKED),
    "chunks of words": endless(b"1;" + b"x" * 6_000 + b"\r\nx\r\n", head=CHUNKED),
    "trailers": endless(b"X-A: 1\r\n" * 2**10, head=CHUNKED + b"1\r\n1\r\n0\r\n"),
    "interim answers": endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "drops of a body": endless(
        b"1", head=b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n", pause_s=0.1
    ),
    "drops of a head": endless(b"X", head=b"HTTP/1.1 200 X\r\nX-A: ", pause_s=0.1),
    "interim drops": endless(b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.1),
    "silence": endless(b"", pause_s=1.0),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_an_end_ends(
    evil: Evil, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(limits, "REMOTE_WAIT_S", 0.2)
    evil.send = ENDLESS[name]
    server = server_of(evil)
    assert "127.0.0.1" in refused(lambda: server.ask("GET", "/v1/me")).message


def test_a_stream_of_events_is_bounded(evil: Evil, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\n"
    monkeypatch.setattr(limits, "REMOTE_EVENT_BYTES", 2**16)
    for part in (b"x" * 2**16, b"data: x\n" * 2**10, b"event: x\n" * 2**10):
        evil.send = endless(part, head=stream)
        events = server_of(evil).events("/v1/x", "")
        with pytest.raises(AutomeshError, match=r"answers with more than 64\.0 KiB"):
            next(events)
    # What it numbers events with goes back in a header.
    evil.send = stream + b"id: 1\r\x00\ndata: a\n\nid: 12-ab\ndata: b\n\n"
    assert [one.number for one in server_of(evil).events("/v1/x", "")] == ["", "12-ab"]
    evil.send = http(b"data: x\n\n", kind="text/html")
    with pytest.raises(AutomeshError, match="text/html"):
        next(server_of(evil).events("/v1/x", ""))


@pytest.mark.parametrize("data", ["null", "[]", "{}", '{"text": 3}', "[" * 10_000, "x"])
def test_events_of_another_shape(evil: Evil, data: str) -> None:
    stream = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\n"
    evil.send = stream + f"event: log\ndata: {data}\n\n".encode()
    refused(lambda: submit.follow(server_of(evil), NUMBER, lambda _: None))


def test_lines_of_a_search_obey_nobody(evil: Evil) -> None:
    said: list[str] = []
    text = json.dumps({"text": f"{ESC}\n{'x' * 10**6}\r{ESC}"})
    stream = f"event: log\ndata: {text}\n\n".encode()

    def send(taken: socket.socket) -> None:
        if evil.asked[-1].startswith(b"GET /v1/submissions/0123456789abcdef/events "):
            taken.sendall(http(stream, kind="text/event-stream"))
        else:
            now = {"submission": {"state": "nothing", "said": f"{ESC}\n{ESC}"}, "studies": []}
            taken.sendall(http(now))

    evil.send = send
    ended = submit.follow(server_of(evil), NUMBER, said.append)
    assert (ended.state, ended.said) == ("nothing", "EVIL EVIL")
    assert said[0] == said[-1] == "EVIL" and len(said[1]) < 2 * limits.REMOTE_LINE_CHARS


@pytest.mark.parametrize(
    "answer",
    [
        {"rule": RULE, "target": "gpu-h100-8"},  # A rule that stands there already.
        {"rule": RULE.replace("cpu-2", "gpu-h100-8"), "target": "gpu-h100-8"},
        {"rule": RULE.partition("[[")[0], "target": "cpu-2"},
        {"rule": RULE + RULE[RULE.index("[[") :], "target": "cpu-2"},
        {"rule": RULE, "target": f"cpu-2{ESC}"},
        {"rule": "x" * 100, "target": "cpu-2"},
        {"rule": "a = " + "[" * 10_000, "target": "cpu-2"},
    ],
)
def test_only_a_rule_that_was_asked_for_is_merged(
    evil: Evil, tmp_path: Path, answer: dict[str, str]
) -> None:
    study = {"state": "ended", "target": answer["target"]}
    evil.send = http({"study": study, "rule": answer["rule"], "missing": ""})
    path = tmp_path / "mesh_rules.toml"
    path.write_text(RULE.replace("cpu-2", "gpu-h100-8"))
    before = path.read_bytes()
    refused(lambda: submit.take_rules(server_of(evil), ["x"], path, targets=["cpu:2"]))
    assert path.read_bytes() == before
    evil.send = http({"study": study | {"target": "cpu-2"}, "rule": RULE, "missing": ""})
    assert submit.take_rules(server_of(evil), ["x"], path, targets=["cpu:2"]) == ["cpu-2"]


LEASE: dict[str, Any] = {
    "id": "0" * 32,
    "number": NUMBER,
    "run": 2,
    "digest": "0" * 64,
    "order": {"entry": "train.py"},
    "log_bytes": 0,
    "state_run": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"id": "\u0661" * 32},  # Digits, and letters to Python; no address has them.
        {"id": "../x"},
        {"number": "../../x"},
        {"digest": "../../../etc/passwd"},
        {"run": 10**30},
        {"run": -1},
        {"state_run": 9},
        {"log_bytes": -5},
        {"log_bytes": 2**62},
        {"order": {"entry": "../train.py"}},
        {"order": {"entry": "train.py", "args": ["\x00"]}},
        {"order": {"entry": "train.py", "of_a_later_version": True}},
        {"of_a_later_version": True},
        {"order": None},
    ],
)
def test_a_lease_that_is_none_is_not_worked_on(
    evil: Evil, tmp_path: Path, change: dict[str, Any]
) -> None:
    agent = agent_of(evil, tmp_path)
    evil.send = http(LEASE)
    lease = agent.take()
    assert lease is not None and lease.number == NUMBER
    evil.send = http(LEASE | change)
    assert "lease" in refused(agent.take).message
    assert sorted(one.name for one in (tmp_path / "agent" / "jobs").iterdir()) == []


@pytest.mark.parametrize("answer", [None, [], 3, {}, {"is_cancelled": "yes"}, {"bytes": 10**30}])
def test_what_an_agent_hears_while_it_works_ends_no_thread(
    evil: Evil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    from automesh_service.remote import agent as module

    monkeypatch.setattr(module, "BEAT_S", 0.01)
    agent = agent_of(evil, tmp_path)
    evil.send = http(LEASE)
    lease = agent.take()
    assert lease is not None
    evil.send = http(answer)
    job = agent.home.job(NUMBER)
    job.mkdir()
    (job / "search.log").write_text("line\n")
    with Beats(server=agent.server, path="/v1/x") as beats:
        sender = module._Sender(agent=agent, beats=beats, path="/v1/x", job=job, lease=lease)
        sender.send_log()
        sender.send_log()
        assert sender.end(0) == ""
        until_asked = len(evil.asked) + 3
        while len(evil.asked) < until_asked:
            time.sleep(0.01)
        assert not beats.is_cancelled


# Nobody there


@pytest.mark.parametrize("what", ["nobody", "dropped", "no name", "plain to TLS", "TLS to plain"])
def test_words_come_soon(
    evil: Evil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Before, nothing was said for five minutes."""
    monkeypatch.setattr(limits, "REMOTE_FIRST_S", 0.8)
    monkeypatch.setattr(limits, "REMOTE_CONNECT_S", 0.3)
    url, expected = {
        "nobody": (f"http://127.0.0.1:{free_ports(1)}", "nobody listens there"),
        "dropped": (evil.url, "not even a refusal"),
        "no name": ("https://mesh.example.invalid", "no host has this name"),
        "plain to TLS": (evil.url, "speaks TLS"),
        "TLS to plain": (evil.url.replace("http:", "https:"), "speaks no TLS"),
    }[what]
    if what == "dropped":
        monkeypatch.setattr(socket, "create_connection", _never)
    if what == "no name":
        monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    evil.send = WRONG["other bytes of TLS"] if what == "plain to TLS" else http(status=400)
    said: list[tuple[float, str]] = []
    began_s = time.monotonic()

    def say(line: str) -> None:
        said.append((time.monotonic() - began_s, line))

    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("")
    server, _ = open_server(url, say)
    error = refused(lambda: submit.submit(server, ORDER, project))
    assert expected in error.message and url in error.message
    # It ends at once, or says for whom it waits, and for how long.
    if what in ("nobody", "dropped"):
        assert said[0][0] < 20 and url in said[0][1] and " s" in said[0][1]
    else:
        assert time.monotonic() - began_s < 20


def _never(address: object, timeout: float, *_: object) -> socket.socket:
    time.sleep(timeout)
    raise TimeoutError("timed out")


def _unknown(*_: object, **__: object) -> list[object]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_service_that_has_answered_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_S", 0.01)
    monkeypatch.setattr(limits, "REMOTE_FIRST_S", 0.05)
    said: list[str] = []
    known = Patience(say=said.append, has_answered=True)
    failures = [Unreachable("nobody")] * 20

    def ask() -> str:
        if failures:
            raise failures.pop()
        return "there"

    assert known.until_answered(ask) == "there"
    assert said == ["nobody; trying again for 300 s", "it answers"]
    failures += [Unreachable("nobody")] * 20
    with pytest.raises(Unreachable):
        Patience(say=said.append).until_answered(ask)


def test_the_command_says_it_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_FIRST_S", 0.2)
    monkeypatch.setattr(patience, "_PAUSE_S", 0.05)
    (tmp_path / "train.py").write_text("")
    port = free_ports(1)
    for command in ("submit train.py --target cpu:2 --server", "search train.py --server"):
        ran = bad_inputs_run.run(
            f"{command} http://127.0.0.1:{port}", tmp_path, {"AUTOMESH_SERVER_TOKEN": TOKEN}
        )
        assert ran.code == 2
        assert "nobody listens there; trying again for 0 s\n" in ran.stderr
        assert ran.stderr.count("error: ") == 1


def test_a_certificate_that_nobody_trusts_is_said(evil: Evil) -> None:
    error = ssl.SSLCertVerificationError("x")
    error.verify_message = ESC
    server = server_of(evil)
    from automesh_service.remote.connection import Pace

    said = server._lost(error, Pace(head_s=1.0, most_bytes=1)).message
    assert said.endswith("its certificate is not trusted: EVIL")
