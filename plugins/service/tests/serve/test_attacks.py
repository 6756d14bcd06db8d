"""What strangers and users try: each is refused with its status, audited, and changes nothing."""

from __future__ import annotations

import gzip
import hashlib
import socket
import tarfile
import time
from urllib.parse import quote

import pytest

from automesh import limits
from automesh_service.serve.limiter import Limiter, TooManyWatchers, Watchers
from plugins.service.tests.serve.conftest import HOSTILE
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import SCRIPT, Running, tar_of

CHANGES = (
    ("PUT", "/v1/bundles/" + "0" * 64),
    ("POST", "/v1/studies"),
    ("POST", "/v1/submissions/0123456789abcdef/cancel"),
    ("POST", "/v1/submissions/0123456789abcdef/resume"),
)
READS = (
    *("/v1/studies", "/v1/studies/x", "/v1/studies/x/rules.toml", "/v1/studies/x/events"),
    *("/v1/studies/x/logs", "/v1/hosts", "/v1/me", "/v1/audit", "/v1/submissions", "/metrics"),
)


def last(running: Running) -> tuple[str, int]:
    """Who was refused last, and with what; the latest entry is no look at the audit."""
    entry = running.audited()[0]
    return entry["who"], entry["status"]


@pytest.fixture(autouse=True)
def _nobody_was_refused_before(running: Running) -> None:
    """Each test begins as the first requests of a day."""
    object.__setattr__(running.service, "limiter", Limiter())


def raw(running: Running, *parts: bytes, pause_s: float = 0.0, wait_s: float = 20.0) -> bytes:
    """Sends bytes as they are, and reads until the server closes."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=wait_s) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # It has hung up already.
                break
            time.sleep(pause_s)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def head(running: Running, method: str, path: str, *lines: str) -> bytes:
    first = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
    token = f"Authorization: Bearer {running.tokens['submit']}\r\n"
    return (first + token + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


# Who asks


@pytest.mark.parametrize(("method", "path"), [*CHANGES, *(("GET", path) for path in READS)])
def test_nothing_without_a_token(running: Running, method: str, path: str) -> None:
    reply = running.ask(method, path, token="", body={} if method == "POST" else None)
    assert (reply.status, last(running)) == (401, ("", 401))


@pytest.mark.parametrize(("method", "path"), CHANGES[2:])
def test_who_may_read_changes_nothing(running: Running, method: str, path: str) -> None:
    assert running.ask(method, path, token="read").status == 403
    assert last(running) == ("ann", 403)


def test_scopes_are_not_taken_from_requests(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    assert submit(running, digest, token="read").status == 403
    assert running.ask("GET", "/v1/audit?scope=admin", token="submit").status == 403
    assert running.ask("GET", "/v1/me", token="read", X_Scope="admin").json()["scope"] == "read"


def test_expired_and_revoked_tokens(running: Running) -> None:
    tokens = running.service.tokens
    expired, revoked = tokens.make("eve", "admin", 1e-9), tokens.make("eve", "admin", None)
    tokens.revoke(revoked.split("_")[1])
    for token, said in ((expired, "expired"), (revoked, "revoked")):
        reply = running.ask("GET", "/v1/studies", token=token)
        assert (reply.status, last(running)) == (401, ("", 401))
        assert said in reply.json()["detail"]


def test_other_schemes_and_places_of_a_token_do_not_count(running: Running) -> None:
    token = running.tokens["admin"]
    for given in (f"Basic {token}", token, f"Bearer  {token} x", "Bearer", f"bearer\t{token}"):
        assert running.ask("GET", "/v1/me", token="", Authorization=given).status == 401
    assert running.ask("GET", f"/v1/me?token={token}", token="").status == 401
    assert running.ask("GET", "/v1/me", token="", Cookie=f"token={token}").status == 401


def test_guessing_is_slowed_down(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REFUSALS_AT_ONCE", 5)
    monkeypatch.setattr(limits, "REFUSALS_PER_S", 1e-3)
    codes = [
        running.ask("GET", "/v1/me", token=f"amt_{number:012x}_{'0' * 64}").status
        for number in range(limits.REFUSALS_AT_ONCE + 5)
    ]
    assert codes[0] == 401
    assert codes[-1] == 429
    assert running.ask("GET", "/v1/me").status == 200  # A valid token still counts.


def test_buckets_fill_again() -> None:
    now_s = 0.0
    limiter = Limiter(lambda: now_s)
    taken = [limiter.take("a") for _ in range(limits.REQUESTS_AT_ONCE)]
    assert set(taken) == {0.0}
    assert 0.0 < limiter.take("a") <= 1.0 / limits.REQUESTS_PER_S
    assert limiter.take("b") == 0.0
    now_s = 1.0
    assert limiter.take("a") == 0.0
    for number in range(20_000):  # Whoever asks costs no memory.
        limiter.take_refusal(str(number))
    assert limiter.known <= 10_000


# Where a request comes from


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""]
)
def test_forged_hosts(running: Running, host: str) -> None:
    host = host.format(port=running.port)
    reply = running.ask("GET", "/v1/studies", Host=host)
    assert (reply.status, last(running)) == (421, ("", 421))


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://", ""]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_other_origins(running: Running, origin: str, method: str) -> None:
    reply = running.ask(method, "/v1/studies", Origin=origin)
    assert (reply.status, last(running)) == (403, ("", 403))
    assert "access-control-allow-origin" not in reply.headers


def test_our_own_origin(running: Running) -> None:
    assert running.ask("GET", "/v1/studies", Origin=running.url).status == 200


def test_answers_cannot_be_framed_or_run(running: Running) -> None:
    for path in ("/v1/studies", "/", "/static/app.js", "/v1/none", "/v1/me"):
        headers = running.ask("GET", path, token="read").headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    policy = running.ask("GET", "/", token="").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


# Bodies


def test_a_body_of_two_gigabytes_is_not_read(running: Running) -> None:
    path = "/v1/bundles/" + "0" * 64
    began_s = time.monotonic()
    answer = raw(running, head(running, "PUT", path, f"Content-Length: {2**31}"), b"x" * 65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - began_s < 60
    assert last(running) == ("", 413)


def test_a_body_that_does_not_say_how_long_it_is(running: Running) -> None:
    path = "/v1/studies"
    lines = ("Transfer-Encoding: chunked", "Content-Type: application/json")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    parts = [chunk] * (limits.REQUEST_BYTES // 65536 + 2)
    answer = raw(running, head(running, "POST", path, *lines), *parts)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert last(running)[1] == 413


def test_slow_bodies_and_heads_are_ended(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    monkeypatch.setattr(limits, "HEAD_S", 0.3)
    path = "/v1/bundles/" + "0" * 64
    whole = head(running, "PUT", path, "Content-Length: 1000")
    answer = raw(running, whole, b"x")  # and then nothing
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert last(running) == ("ann", 408)
    drops = [b"x"] * 8
    answer = raw(running, whole, *drops, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert raw(running, whole[:20]).startswith(b"HTTP/1.1 408 ")
    assert raw(running, b"") == b""


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "9" * 30, "10, 20", "abc"])
def test_lengths_that_are_none(running: Running, length: str) -> None:
    whole = head(running, "PUT", "/v1/bundles/" + "0" * 64, f"Content-Length: {length}")
    answer = raw(running, whole, b"x" * 10)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))


def test_nested_and_broken_json(running: Running) -> None:
    for body in (b"[" * 100_000, b"{", b'"x"', b"\xff\xfe", b'{"a":' * 10_000, b"1" * 5_000):
        reply = running.ask(
            "POST",
            "/v1/studies",
            token="submit",
            body=body,
            Content_Type="application/json",
            Idempotency_Key="nested-json",
        )
        assert reply.status in (400, 422), body[:10]
        assert "Traceback" not in reply.text


# Bundles


@pytest.mark.parametrize("kind", ["link", "dots", "absolute", "bomb", "no tar"])
def test_hostile_tars(running: Running, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUNDLE_UNPACKED_BYTES", 2**22)
    link = tarfile.TarInfo("train.py")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    data = {
        "link": lambda: tar_of({}, link),
        "dots": lambda: tar_of({"../../train.py": SCRIPT}),
        "absolute": lambda: tar_of({"/tmp/train.py": SCRIPT}),
        "bomb": lambda: gzip.compress(bytes(limits.BUNDLE_UNPACKED_BYTES + 1), 1),
        "no tar": lambda: b"what is this",
    }[kind]()
    digest = hashlib.sha256(data).hexdigest()
    reply = running.ask("PUT", f"/v1/bundles/{digest}", token="submit", body=data)
    assert (reply.status, last(running)) == (422, ("ann", 422))
    assert submit(running, digest).status == 404
    left = [one.name for one in running.service.home.bundle(digest).parent.iterdir()]
    assert not any(digest in name or name.endswith(".draft") for name in left)


def test_a_bundle_under_the_name_of_another(running: Running) -> None:
    reply = running.ask("PUT", "/v1/bundles/" + "0" * 64, token="submit", body=BUNDLE)
    assert reply.status == 422
    for name in ("x", "..", "A" * 64, "0" * 63):
        assert running.ask("PUT", f"/v1/bundles/{name}", token="submit", body=b"").status in (
            400,
            422,
        )


@pytest.mark.parametrize(
    "path",
    [
        "/v1/studies/../../etc/passwd",
        "/v1/studies/..%2f..%2fetc%2fpasswd",
        "/static/../app.py",
        "/static/..%5capp.py",
        "/v1/bundles/..%2f..%2fservice.db",
        "//etc/passwd",
        "/v1/studies/%00",
    ],
)
def test_paths_that_lead_out(running: Running, path: str) -> None:
    reply = running.ask("GET", path)
    assert reply.status in (400, 404)
    assert "root:" not in reply.text


# What others have written


def test_markup_of_others_is_never_a_page(running: Running) -> None:
    listed = running.ask("GET", "/v1/studies")
    assert HOSTILE in {one["name"] for one in listed.json()["studies"]}
    assert listed.headers["content-type"] == "application/json"
    one = running.ask("GET", f"/v1/studies/{quote(HOSTILE, safe='')}")
    assert one.json()["study"]["workload"] == "<script>alert(1)</script>"
    table = running.ask("GET", f"/v1/studies/{quote(HOSTILE, safe='')}/table.txt")
    assert table.headers["content-type"] == "text/plain; charset=utf-8"
    missing = running.ask("GET", f"/v1/studies/{quote('<script>alert(1)</script>', safe='')}")
    assert missing.headers["content-type"] == "application/problem+json"
    # Our own page has nothing of anybody in it.
    page = running.ask("GET", f"/studies/{quote(HOSTILE, safe='')}", token="")
    assert page.body == running.ask("GET", "/", token="").body


def test_errors_tell_strangers_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(type(running.service.catalogue), "get", broken)
    reply = running.ask("GET", "/v1/studies/x")
    assert reply.status == 500
    assert "secret" not in reply.text


# Streams


def test_floods_of_streams_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WATCHERS_OF_ONE", 2)
    path = f"/v1/studies/{quote(HOSTILE, safe='')}/events"
    lines = head(running, "GET", path)
    open_ones = []
    try:
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", running.port), timeout=20)
            open_ones.append(connection)
            connection.sendall(lines)
            assert b" 200 " in connection.recv(4096)
        refused = running.ask("GET", path, token="submit")
        assert (refused.status, last(running)) == (429, ("ann", 429))
        assert int(refused.headers["retry-after"]) > 0
    finally:
        for connection in open_ones:
            connection.close()
    end_s = time.monotonic() + 300
    while running.service.watchers.count and time.monotonic() < end_s:
        time.sleep(0.05)
    assert running.service.watchers.count == 0


def test_watchers_are_counted_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WATCHERS", 2)
    watchers = Watchers()
    with watchers.one("a"), watchers.one("b"):
        with pytest.raises(TooManyWatchers):
            watchers.enter("c")
        assert watchers.count == 2
    assert watchers.count == 0


def test_a_replayed_request_does_nothing_twice(running: Running) -> None:
    digest = running.send_bundle(BUNDLE)
    count = running.service.store.listed()[1]
    numbers = {submit(running, digest, key="replayed-key").json()["number"] for _ in range(5)}
    assert len(numbers) == 1
    assert running.service.store.listed()[1] == count + 1
    token = running.service.tokens.make("carol", "submit", None)
    running.tokens["carol"] = token
    digest = running.send_bundle(BUNDLE, token="carol")
    assert submit(running, digest, token="carol", key="replayed-key").status == 201
    running.service.tokens.revoke(token.split("_")[1])
    assert submit(running, digest, token="carol", key="replayed-key").status == 401
