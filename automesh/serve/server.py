"""Starts the service: checks what it may listen at, opens it, and keeps its runner alive."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from filelock import Timeout
from uvicorn.protocols.http.h11_impl import H11Protocol

from automesh import limits
from automesh.errors import UsageError
from automesh.files import write_whole
from automesh.launch.wire import check_address
from automesh.reading import read_text
from automesh.remote.credentials import forget_server, leave_word
from automesh.serve.app import make_app
from automesh.serve.service import Service, Settings, open_service
from automesh.submissions.home import open_home
from automesh.submissions.runner import start_runner, tell_to_stop
from automesh.submissions.tokens import Holder
from automesh.texts.storage_url import PASSWORD, has_secret
from automesh.tuner.study.storage import parse_storage

DEFAULT_PORT = 8700
_SUPERVISE_S = 2.0
_STOP_S = 70.0  # a search has a minute to end
_LOCAL = "local"
_MOST_CONNECTIONS = 2_000
_SWITCH_S = 0.0005
_BACKLOG = 512
_LOG = logging.getLogger("automesh.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `automesh serve` is told.

    Attributes:
      home: folder of the service.
      results: folder with the studies of searches on this machine.
      listen: address, with or without a port.
      names: further names under which it is reached, as behind a proxy.
      certificate, key: PEM files; both or none.
      searches: how many run at once; 0: it takes no submissions.
      keep_s: age from which on submissions that have ended are removed; None to keep all.
      has_runner: searches are run on this host, too; False: by agents alone.
    """

    home: Path
    results: Path
    storage: str
    listen: str
    names: tuple[str, ...]
    certificate: Path | None
    key: Path | None
    searches: int
    keep_s: float | None = None
    has_runner: bool = True


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Args:
      say: shows a line to who started it.

    Raises:
      UsageError: an option is wrong, another service uses the folder, or it would be reachable
        from elsewhere without TLS or without a token.
    """
    host, port = read_address(options.listen)
    context = tls_context(options)
    if not is_loopback(host) and context is None:
        raise UsageError(
            f"others than this machine can reach `{host}`, where tokens and code would be sent in "
            "the clear",
            hint="give --certificate and --key, or listen at 127.0.0.1 behind a proxy with TLS",
        )
    if options.storage:
        if has_secret(options.storage):
            raise UsageError(
                "--storage: a service must not have the password of its storage in the URL",
                hint=f"leave it out, and set {PASSWORD}: searches get it from there",
            )
        parse_storage(options.storage, options.results)
    scheme = "https" if context is not None else "http"
    settings = Settings(
        results=options.results.absolute(),
        storage=options.storage,
        names=names_of(host, port, scheme, options.names),
        searches=options.searches,
        takes_submissions=options.searches > 0,
        keep_s=options.keep_s,
        has_runner=options.has_runner,
    )
    home = open_home(options.home)
    try:
        with home.lock("server", timeout_s=2.0):
            service = open_service(home, settings)
            _serve(service, host, port, context, say)
    except Timeout:
        raise UsageError(
            f"another service uses the folder `{home.folder}`",
            hint="end that one, or choose another folder with --home",
        ) from None


def _serve(
    service: Service,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    say: Callable[[str], None],
) -> None:
    scheme = "https" if context is not None else "http"
    # Answers are made in threads. Each takes the interpreter's lock a dozen times, and would wait
    # for it 5 ms each time that another one computes.
    sys.setswitchinterval(_SWITCH_S)
    threads = [
        threading.Thread(target=service.keep_up, name="studies", daemon=True),
        threading.Thread(target=service.keep_house, name="housekeeping", daemon=True),
    ]
    runner = RunnerOfService(service)
    has_runner = service.settings.takes_submissions and service.settings.has_runner
    if service.settings.takes_submissions:
        threads.append(threading.Thread(target=service.keep_leases, name="leases", daemon=True))
    if has_runner:
        threads.append(threading.Thread(target=runner.keep_alive, name="runner", daemon=True))
    url = f"{scheme}://{_in_url(host)}:{port}"
    sockets: list[socket.socket] = []
    has_left_word = False
    try:
        token = _first_token(service, host)
        # Before anything else: who has the address already has left its own word.
        sockets = bound(host, port)
        if token:
            leave_word(port, token)
            has_left_word = True
            say(f"open {url}/#token={token}")
        say(f"serving {url} (stop with Ctrl-C)")
        for thread in threads:
            thread.start()
        _run(service, sockets, context)
    finally:
        service.close()
        for one in sockets:
            one.close()
        for thread in threads:
            if thread.ident is not None:
                thread.join(5.0)
        if has_left_word:
            forget_server(port)
        if has_runner:
            runner.stop(say)
        service.catalogue.close()
        service.database.close()


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host.

    Raises:
      UsageError: there is no such host, or something else listens there.
    """
    sockets: list[socket.socket] = []
    reason = "it has no address of this machine"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                # `localhost` has an address of IPv6 also where the system has no IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                reason = error.strerror or reason
    except OSError as error:
        for one in sockets:
            one.close()
        sockets, reason = [], error.strerror or str(error)
    if not sockets:
        raise UsageError(
            f"--listen: `{_in_url(host)}:{port}` cannot be listened at: {reason.lower()}",
            hint="choose another address or port with --listen",
        )
    return sockets


def _run(service: Service, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
    config = uvicorn.Config(
        make_app(service),
        http=TimedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level=logging.WARNING,
        access_log=False,  # Addresses of pages have tickets in them.
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=32 * 2**10,
        limit_concurrency=_MOST_CONNECTIONS,
        backlog=_BACKLOG,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    server = Server(config)
    server.service = service
    # uvicorn repeats the signal that has ended it, for those who started it in a program.
    with suppress(KeyboardInterrupt):
        server.run(sockets=sockets)


class Server(uvicorn.Server):
    """uvicorn's server, which ends streams of events when it is told to end."""

    service: Service

    def handle_exit(self, sig: int, frame: object) -> None:
        self.service.closing.set()
        super().handle_exit(sig, frame)  # pyright: ignore[reportArgumentType]


@dataclass
class RunnerOfService:
    """Keeps a runner alive: one of a server that was killed is left at its work."""

    service: Service
    process: subprocess.Popen[bytes] | None = None

    def keep_alive(self) -> None:
        """Until the service closes; a thread of its own does it."""
        service = self.service
        while not service.closing.is_set():
            if self.process is None or self.process.poll() is not None:
                try:
                    self.process = start_runner(
                        service.home,
                        searches=service.settings.searches,
                        storage=service.settings.storage,
                    )
                except OSError as error:  # The disk may have room again soon.
                    _LOG.warning("the runner cannot be started: %s", error)
            service.closing.wait(_SUPERVISE_S)

    def stop(self, say: Callable[[str], None]) -> None:
        """Ends the runner with its searches, which are queued for the next service."""
        service, mine = self.service, self.process
        tell_to_stop(service.database)
        if mine is not None and mine.poll() is None:
            mine.terminate()  # It may not have begun to listen to the database.
        lock, end_s = service.home.lock("runner"), time.monotonic() + _STOP_S
        said = False
        while time.monotonic() < end_s:
            if mine is None or mine.poll() is not None:
                with suppress(Timeout), lock:
                    return
            if not said and service.store.counts().get("running"):
                say("waiting for the searches that run: they keep what they have")
                said = True
            time.sleep(0.2)


def _first_token(service: Service, host: str) -> str:
    """A token for who starts a service on this machine's own address; empty elsewhere.

    Raises:
      UsageError: it is reachable from elsewhere, and nobody could use it.
    """
    if is_loopback(host):
        # The same one after a restart: who watches goes on watching.
        path = service.home.folder / "local.token"
        kept = (
            read_text(path, limit_bytes=limits.SMALL_RECORD_BYTES).strip() if path.exists() else ""
        )
        if isinstance(service.tokens.check(kept), Holder):
            return kept
        token = service.tokens.make(_LOCAL, "admin", None)
        write_whole(path, token)  # In a folder that nobody else may enter.
        path.chmod(0o600)
        return token
    if not any(one.state == "valid" for one in service.tokens.listed()):
        raise UsageError(
            "nobody has a token for this service yet",
            hint=f"make one: `automesh token NAME --scope admin --home {service.home.folder}`",
        )
    return ""


# Addresses


def read_address(text: str) -> tuple[str, int]:
    """The host and the port of `--listen`.

    Raises:
      UsageError: it is no address.
    """
    host, port = check_address(text, port_needed=False)
    return host.strip("[]"), port or DEFAULT_PORT


def _has_port(text: str) -> bool:
    return ":" in text.rpartition("]")[2]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str, port: int, scheme: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """What may stand in the `Host` header of a request, in small letters.

    Raises:
      UsageError: a name that no host can have.
    """
    for name in names:
        label = name.rpartition(":")[0] if _has_port(name) else name
        if not label or any(not (char.isalnum() or char in ".-_[]:") for char in label):
            raise UsageError(
                f"--hostname: `{name}` is no name of a host", hint="write `mesh.example.com`"
            )
    known = {_in_url(host)}
    if is_loopback(host):
        known |= {"localhost", "127.0.0.1", "[::1]"}
    usual = {"http": 80, "https": 443}[scheme]
    with_ports = {f"{name}:{port}" for name in known} | (known if port == usual else set())
    given = {name.lower() for name in names}
    given |= {f"{name.lower()}:{port}" for name in names if not _has_port(name)}
    return tuple(sorted(with_ports | given))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """What connections are encrypted with; None without a certificate.

    Raises:
      UsageError: one of the two is missing, or they cannot be used.
    """
    if options.certificate is None and options.key is None:
        return None
    if options.certificate is None or options.key is None:
        raise UsageError("--certificate and --key are given together, or neither of them")
    for option, path in (("--certificate", options.certificate), ("--key", options.key)):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UsageError(f"{option}: `{path}` is no file that can be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a terminal a key with a passphrase would be waited for.
        context.load_cert_chain(options.certificate, options.key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--certificate and --key cannot be used: {error}",
            hint="both are PEM files, the key without a passphrase",
        ) from None
    return context


def to_stderr(line: str) -> None:
    """Shows a line to who started the service; stdout has nothing."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request is at work and none has come for `HEAD_S`.

    uvicorn times how long a connection is idle after an answer, but not how long a head takes to
    arrive: a thousand connections that send a byte a minute would keep all there are.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_at_work():
            self._stop_waiting()
        elif self._deadline is None:  # The next head has begun: what it has is not made longer.
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_at_work(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(limits.HEAD_S, self._on_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_late(self) -> None:
        self._deadline = None
        if not self._is_at_work() and not self.transport.is_closing():
            self.transport.close()
