"""Starts the service: checks the address to listen at, opens the service, and keeps its runner
alive."""

from __future__ import annotations

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
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from filelock import Timeout

from automesh import limits
from automesh.errors import UsageError
from automesh.files import write_whole
from automesh.reading import read_text
from automesh.texts.storage_url import PASSWORD, has_secret
from automesh.tuner.study.storage import parse_storage
from automesh.units import format_bytes
from automesh_service.remote.credentials import forget_server, leave_word
from automesh_service.serve.net.addresses import (
    bound,
    in_url,
    is_loopback,
    names_of,
    read_address,
    read_proxy,
    tls_context,
)
from automesh_service.serve.net.descriptors import connections_for, raise_limit
from automesh_service.serve.net.http_server import make_server, run_server
from automesh_service.serve.service import OpenService, ServiceSettings, open_service
from automesh_service.submissions.database import Unwritable
from automesh_service.submissions.home import open_home
from automesh_service.submissions.runner import start_runner, tell_to_stop
from automesh_service.submissions.tokens import Holder

_SUPERVISE_S = 2.0
_STOP_S = 70.0  # a search has a minute to end
_LOCAL = "local"
_SWITCH_S = 0.0005
_LOG = logging.getLogger("automesh.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `automesh serve`.

    Attributes:
      home: folder of the service.
      results: folder with the studies of searches on this machine.
      listen: the address to listen at, with or without a port.
      names: further host names of the service, as behind a proxy.
      certificate, key: PEM files; both or none.
      searches: how many run at once; 0: the service takes no submissions.
      keep_s: age from which on ended submissions are removed; None to keep all.
      has_runner: whether searches run on this host, too; False: only agents run them.
      proxies: addresses of proxies; many users share their connections.
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
    proxies: tuple[str, ...] = ()


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Args:
      say: shows a line to the user who started the service.

    Raises:
      UsageError: an option is wrong, another service uses the folder, or the service would be
        reachable from other hosts without TLS or without a token.
    """
    host, port = read_address(options.listen)
    context = tls_context(options.certificate, options.key)
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
    _check_results(options.results)
    if options.has_runner:
        _check_searches(options.searches)
    scheme = "https" if context is not None else "http"
    settings = ServiceSettings(
        results=options.results.absolute(),
        storage=options.storage,
        names=names_of(host, port, scheme, options.names),
        searches=options.searches,
        takes_submissions=options.searches > 0,
        keep_s=options.keep_s,
        has_runner=options.has_runner,
        connections=connections_for(raise_limit()),
        proxies=tuple(read_proxy(one) for one in options.proxies),
    )
    home = open_home(options.home)
    try:
        with home.lock("server", timeout_s=2.0):
            service = open_service(home, settings)
            _serve(service, options, context, say)
    except Timeout:
        raise UsageError(
            f"another service uses the folder `{home.folder}`",
            hint="end that one, or choose another folder with --home",
        ) from None


def _serve(
    service: OpenService,
    options: ServeOptions,
    context: ssl.SSLContext | None,
    say: Callable[[str], None],
) -> None:
    host, port = read_address(options.listen)
    scheme = "https" if context is not None else "http"
    # Threads make the answers. Each thread takes the interpreter's lock a dozen times, and each
    # time waits 5 ms for it if another thread is computing.
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
    sockets: list[socket.socket] = []
    has_left_word = False
    try:
        token = _first_token(service, host)
        # The address is bound before the token is written: another service at this address has
        # written its own token.
        sockets = bound(host, port)
        port = sockets[0].getsockname()[1]
        names = names_of(host, port, scheme, options.names)
        service = replace(service, settings=replace(service.settings, names=names))
        url = f"{scheme}://{in_url(host)}:{port}"
        if token:
            leave_word(port, token)
            has_left_word = True
            say(f"open {url}/#token={token}")
        say(f"serving {url} (stop with Ctrl-C)")
        for thread in threads:
            thread.start()
        run_server(make_server(service, context), sockets)
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


@dataclass
class RunnerOfService:
    """Keeps a runner alive. After a server was killed, its runner goes on and is used again."""

    service: OpenService
    process: subprocess.Popen[bytes] | None = None

    def keep_alive(self) -> None:
        """Starts the runner whenever there is none, until the service closes; runs in a thread of
        its own."""
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
        """Ends the runner and its searches, which are queued for the next service."""
        service, mine = self.service, self.process
        with suppress(Unwritable):  # Then only the signal below ends it.
            tell_to_stop(service.database)
        if mine is not None and mine.poll() is None:
            mine.terminate()  # It may not read the database yet.
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


def _first_token(service: OpenService, host: str) -> str:
    """Makes a token for the user who starts a service on this machine's own address. Returns an
    empty text at other addresses.

    Raises:
      UsageError: the service is reachable from other hosts, but there is no token to use it with.
    """
    if is_loopback(host):
        # The token is the same after a restart, so open pages continue.
        path = service.home.folder / "local.token"
        kept = (
            read_text(path, limit_bytes=limits.SMALL_RECORD_BYTES).strip() if path.exists() else ""
        )
        if isinstance(service.tokens.check(kept), Holder):
            return kept
        token = service.tokens.make(_LOCAL, "admin", None)
        write_whole(path, token)  # In a folder that no other user can enter.
        path.chmod(0o600)
        return token
    if not any(one.state == "valid" for one in service.tokens.listed()):
        raise UsageError(
            "nobody has a token for this service yet",
            hint=f"make one: `automesh token NAME --scope admin --home {service.home.folder}`",
        )
    return ""


# Checks of the options


def _check_results(results: Path) -> None:
    """Raises UsageError if the path exists and is no folder of studies."""
    if results.exists() and not results.is_dir():
        raise UsageError(
            f"--results: `{results}` is no folder", hint="name the folder in which the studies are"
        )


def _check_searches(searches: int) -> None:
    """Raises UsageError for more searches at once than this machine can run."""
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory().total
    most = max(1, min(cores, memory // limits.SEARCH_BYTES))
    if searches > most:
        raise UsageError(
            f"--searches: this machine has {cores} cores and {format_bytes(memory)} of memory, for "
            f"{most} searches at once, not {searches}",
            hint="each is a process with workers of its own; leave it out to run one after another",
        )


def to_stderr(line: str) -> None:
    """Shows a line to the user who started the service; stdout stays empty."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
