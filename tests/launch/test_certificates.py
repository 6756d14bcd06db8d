"""What search and agents say is encrypted with certificates; who trusts none is told, on both
sides."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.launch.agent import HostAgent
from automesh.launch.asking import ask
from automesh.launch.certificates import read_identity, read_trusted, silenced_grpc
from automesh.launch.cluster import Cluster, spread
from automesh.launch.fleet import Fleet
from automesh.launch.local import local_launcher
from automesh.launch.secret import new_token
from tests.support.certificates import Pair, authority, signed
from tests.support.paths import ROOT

TOKEN = new_token()
SOON_S = 30.0
"""Far below the minute that an agent waits for a search that is not there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ca(folder: Path) -> Pair:
    return authority(folder)


@pytest.fixture(scope="module")
def search(ca: Pair) -> Pair:
    return signed(ca)


@pytest.fixture
def notices() -> list[str]:
    return []


@contextmanager
def fleet_of(pair: Pair | None, notices: list[str], **changes: Any) -> Generator[Fleet]:
    certificates = None
    if pair is not None:
        certificates = (pair.key.read_bytes(), pair.certificate.read_bytes())
    settings: dict[str, Any] = {"hosts": 1, "listen": ("127.0.0.1", 0), **changes}
    settings |= {"certificates": certificates, "notice": notices.append}
    with Fleet(token=TOKEN, **settings) as fleet:
        yield fleet


def trusted(pair: Pair) -> bytes:
    return read_trusted(str(pair.certificate))


def refusal(fleet: Fleet, ca: Pair | None, token: str = TOKEN) -> UsageError:
    """What an agent says that is refused, well before it gives up."""
    trust = trusted(ca) if ca is not None else None
    agent = HostAgent(search=fleet.address, token=token, trusted=trust, wait_s=4 * SOON_S)
    began_s = time.monotonic()
    with pytest.raises(UsageError) as caught:
        agent.serve()
    assert time.monotonic() - began_s < SOON_S
    return caught.value


def heard(fleet: Fleet, notices: list[str]) -> str:
    """What the search has said of one agent."""
    end_s = time.monotonic() + SOON_S
    while not notices and time.monotonic() < end_s:
        with pytest.raises(UsageError):
            fleet.wait(0.0)
        time.sleep(0.05)
    (only,) = notices
    return only


@contextmanager
def serving(address: str, ca: Pair | None) -> Generator[None]:
    """An agent in a thread, which ends well when its search does."""
    errors: list[UsageError] = []
    trust = trusted(ca) if ca is not None else None
    agent = HostAgent(search=address, token=TOKEN, name="host-of-ours", trusted=trust)

    def serve() -> None:
        try:
            agent.serve()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert errors == []


class Tap:
    """Passes on what two sides say to each other, and keeps all of it.

    Args:
      port: of the side that is dialled.
    """

    def __init__(self, port: int) -> None:
        self.kept = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = list[threading.Thread]()
        self._start(self._accept)

    def _start(self, what: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=what, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                self._start(self._pass, near, far)
                self._start(self._pass, far, near)

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                self.kept += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SOON_S)
        for one in self._sockets:
            one.close()


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_who_listens_in_between_reads_nothing(
    is_encrypted: bool, ca: Pair, search: Pair, notices: list[str]
) -> None:
    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of(search if is_encrypted else None, notices))
        tap = Tap(int(fleet.address.rpartition(":")[2]))
        stack.callback(tap.close)
        stack.enter_context(serving(tap.address, ca if is_encrypted else None))
        fleet.wait(60)
        (host,) = ask(tap.address, TOKEN, trusted=trusted(ca) if is_encrypted else None).present
        assert host.name == "host-of-ours"
        fleet.close()
    readable = [word for word in (b"hello", b"proof", b"welcome", b"wanted") if word in tap.kept]
    assert readable == ([] if is_encrypted else [b"hello", b"proof", b"welcome", b"wanted"])
    assert len(tap.kept) > 2000


def test_the_token_is_asked_for_as_before(ca: Pair, search: Pair, notices: list[str]) -> None:
    with fleet_of(search, notices) as fleet:
        assert "has another token" in refusal(fleet, ca, new_token()).message
        assert heard(fleet, notices).endswith(" was refused: it has another token")


def test_a_search_whose_own_certificate_is_trusted_needs_no_authority(
    search: Pair, notices: list[str]
) -> None:
    with fleet_of(search, notices) as fleet, serving(fleet.address, search):
        fleet.wait(60)
        fleet.close()


def test_who_does_not_trust_the_search_is_told_and_so_is_the_search(
    folder: Path, search: Pair, notices: list[str]
) -> None:
    other = authority(folder, "other-authority")
    with fleet_of(search, notices) as fleet:
        error = refusal(fleet, other)
        assert error.message == (
            f"none of the certificates in --ca has signed that of the search at {fleet.address}"
        )
        assert error.hint.startswith("give --ca the certificate that signed")
        said = heard(fleet, notices)
    assert said.startswith("a connection from 127.0.0.1:")
    assert said.endswith(" was given up: no certificate in its --ca has signed that of this search")


@pytest.mark.parametrize("names", ["DNS:mesh.example.com", "DNS:*.example.com,IP:10.0.0.1"])
def test_a_certificate_for_another_name_is_refused(
    names: str, ca: Pair, notices: list[str]
) -> None:
    pair = signed(ca, "named", names=names)
    with fleet_of(pair, notices) as fleet:
        error = refusal(fleet, ca)
        assert error.message == (
            f"the certificate of the search at {fleet.address} is not for `127.0.0.1`"
        )
        assert "`subjectAltName` for `127.0.0.1`" in error.hint
        assert heard(fleet, notices).endswith(
            " was given up: it has dialled a name that the certificate of this search is not for"
        )


def test_a_certificate_that_has_expired_is_refused_by_the_search_itself_and_by_agents(
    ca: Pair, notices: list[str]
) -> None:
    pair = signed(ca, "expired", days=-1)
    with pytest.raises(UsageError, match=r"--certificate: `.*` has expired"):
        read_identity(str(pair.certificate), str(pair.key), str(ca.certificate), host="")
    with fleet_of(pair, notices) as fleet:
        wanted = f"the certificate of the search at {fleet.address} has expired"
        assert refusal(fleet, ca).message == wanted


def test_an_agent_without_certificates_is_told_and_so_is_the_search(
    search: Pair, notices: list[str]
) -> None:
    with fleet_of(search, notices) as fleet:
        error = refusal(fleet, None)
        assert error.message == (
            f"the search at {fleet.address} encrypts its channel, and no --ca was given"
        )
        assert heard(fleet, notices).endswith(
            " was given up: it has no --ca, and this search has a --certificate"
        )
        with pytest.raises(UsageError, match="encrypts its channel"):
            ask(fleet.address, TOKEN)


def test_a_search_without_certificates_is_told_and_so_is_the_agent(
    ca: Pair, notices: list[str]
) -> None:
    with fleet_of(None, notices) as fleet:
        error = refusal(fleet, ca)
        assert error.message == (
            f"the search at {fleet.address} does not encrypt its channel, and --ca was given"
        )
        assert error.hint.startswith("start the search with --certificate and --key")
        assert heard(fleet, notices).endswith(
            " was given up: it has a --ca, and this search no --certificate"
        )


@pytest.mark.slow
def test_a_search_that_is_not_there_yet_is_waited_for(
    ca: Pair, search: Pair, notices: list[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with serving(f"127.0.0.1:{port}", ca):
        time.sleep(3)
        with fleet_of(search, notices, listen=("127.0.0.1", port)) as fleet:
            fleet.wait(60)
    assert notices == []


def test_agents_that_are_started_trust_what_the_search_names(
    ca: Pair, search: Pair, notices: list[str]
) -> None:
    with (
        local_launcher() as launcher,
        fleet_of(search, notices, launcher=launcher, ca=str(ca.certificate)) as fleet,
    ):
        fleet.wait(120)
        (facts,) = fleet.facts
        assert facts.name == "local-1"
        assert fleet.agent_words == f"automesh agent {fleet.address} --ca {ca.certificate}"


# The files.


@pytest.fixture
def files(ca: Pair, search: Pair) -> dict[str, str]:
    return {
        "certificate": str(search.certificate),
        "key": str(search.key),
        "ca": str(ca.certificate),
        "host": "127.0.0.1",
    }


def test_files_that_go_together_are_read(files: dict[str, str], search: Pair) -> None:
    assert read_identity(**files) == (search.key.read_bytes(), search.certificate.read_bytes())
    secret, chain = read_identity(**{**files, "ca": "", "host": ""})
    assert (secret, chain) == (search.key.read_bytes(), search.certificate.read_bytes())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ca": "foreign"}, "--ca: nothing in `.*` has signed the certificate in `.*`"),
        ({"host": "10.0.0.1"}, "--certificate: `.*` is not for `10.0.0.1`, which agents"),
        ({"key": "foreign"}, "--certificate and --key cannot be used: "),
        ({"key": "missing"}, "--key: `.*missing` cannot be read: no such file"),
        ({"certificate": "folder"}, "--certificate: .* is a folder"),
        ({"certificate": "text"}, "--certificate and --key cannot be used: "),
        ({"ca": "text"}, "--ca: `.*` holds no certificate that can be read"),
    ],
)
def test_files_that_do_not_are_a_sentence(
    change: dict[str, str], says: str, files: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    foreign = authority(folder, "foreign")
    (tmp_path / "text").write_text("no certificate")
    places = {
        "foreign": str(foreign.key if "key" in change else foreign.certificate),
        "folder": str(tmp_path),
        "text": str(tmp_path / "text"),
        "missing": str(tmp_path / "missing"),
    }
    changed = {name: places.get(value, value) for name, value in change.items()}
    with pytest.raises(UsageError, match=says):
        read_identity(**{**files, **changed})


def test_the_guide_makes_certificates_that_are_taken(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (commands,) = (
        block
        for block in re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
        if "req -x509" in block
    )
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    paths = [str(tmp_path / name) for name in ("search.pem", "search.key", "ca.pem")]
    for host in ("10.0.0.1", "host-a"):
        read_identity(*paths, host=host)
    assert stat.S_IMODE((tmp_path / "search.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"certificate": "a"}, "--certificate and --key are given together"),
        ({"ca": "a", "listen": "10.0.0.1"}, "this search has no --certificate"),
        ({"certificate": "a", "key": "a", "launch": "slurm"}, "need a --ca to trust its"),
        ({"certificate": "a", "key": "a"}, "need a --ca to trust its"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Cluster(**given)  # pyright: ignore[reportArgumentType]


def test_a_search_on_one_host_has_nothing_to_encrypt() -> None:
    cluster = Cluster(certificate="a", key="a", ca="a")
    with pytest.raises(UsageError, match="a search on this host alone has no agents"):
        spread(parse_target("cpu:4", os.environ), cluster)
    assert spread(parse_target("cpu:4*2", os.environ), cluster).processes == 2
    Cluster(certificate="a", key="a", listen="10.0.0.1")


@pytest.fixture
def verbosity(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    yield monkeypatch


def test_what_grpc_prints_is_the_users_choice_and_none_of_the_workers(
    verbosity: pytest.MonkeyPatch,
) -> None:
    with silenced_grpc():
        assert os.environ["GRPC_VERBOSITY"] == "NONE"
    assert "GRPC_VERBOSITY" not in os.environ
    verbosity.setenv("GRPC_VERBOSITY", "DEBUG")
    with silenced_grpc():
        assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
