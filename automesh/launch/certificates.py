"""The encrypted channel of a search and its agents: its certificates, and what is wrong with them.

The search has a certificate with its key, and agents have certificates that they trust; gRPC makes
an encrypted channel of them (TLS). Who an agent is, its token says, with or without.

gRPC waits for a channel that cannot be, and does not say why; and a server never hears of those who
hang up on its certificate. So whoever comes to no channel asks with Python's own TLS what is the
matter, and tells the search one word of it, through a channel that takes any certificate and in
which nothing secret is said. The search tries its certificate on itself before it waits for agents.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.launch import wire
from automesh.reading import read_bytes
from automesh.texts.user_text import user_path
from automesh.worker.wire import Message

_MOST_BYTES = 2**20
_LOOK_S = 1.0  # A channel that is possible is there by then, unless the search is not.
_PROBE_S = 3.0
_STEPS = 10  # Of a handshake in memory; TLS 1.3 needs three.
_VERBOSITY = "GRPC_VERBOSITY"
_OPENSSL_CODES = {
    **dict.fromkeys((2, 18, 19, 20, 21), "issuer"),
    **dict.fromkeys((62, 64), "name"),
    9: "early",
    10: "expired",
}
"""Of `SSLCertVerificationError.verify_code`: OpenSSL's X509_V_ERR_..., x509_vfy.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One way in which there is no channel.

    Attributes:
      said: to whoever dialled, of `{search}` and its `{host}`.
      hint: what to do.
      told: to the search, of whoever has dialled.
    """

    said: str
    hint: str
    told: str


_KINDS = {
    "issuer": _Kind(
        said="none of the certificates in --ca has signed that of the search at {search}",
        hint="give --ca the certificate of who has signed the search's --certificate, or that "
        "certificate itself",
        told="its --ca has not signed the certificate of this search",
    ),
    "name": _Kind(
        said="the certificate of the search at {search} is not for `{host}`",
        hint="dial a name that the certificate is for, or make one with `subjectAltName` for "
        "`{host}`",
        told="it has dialled a name that the certificate of this search is not for",
    ),
    "expired": _Kind(
        said="the certificate of the search at {search} has expired",
        hint="make a new one; if it has not, the clock of this host is wrong",
        told="it takes the certificate of this search for expired",
    ),
    "early": _Kind(
        said="the certificate of the search at {search} is not valid yet",
        hint="wait; if it is, the clock of this host is wrong",
        told="it takes the certificate of this search for one that is not valid yet",
    ),
    "plain": _Kind(
        said="the search at {search} encrypts what it says, and no --ca was given",
        hint="give --ca the certificate of who has signed the search's --certificate",
        told="it has no --ca, and this search has a --certificate",
    ),
    "encrypted": _Kind(
        said="the search at {search} does not encrypt what it says, and --ca was given",
        hint="start the search with --certificate and --key, or leave --ca out",
        told="it has a --ca, and this search no --certificate",
    ),
    "other": _Kind(
        said="the certificate of the search at {search} is not to be trusted",
        hint="`openssl verify -CAfile CA CERTIFICATE` may say more",
        told="it does not trust the certificate of this search",
    ),
}


# What the search has.


def read_identity(certificate: str, key: str, ca: str, *, host: str) -> tuple[bytes, bytes]:
    """The key and the certificates of a search, which are tried as an agent would.

    Args:
      certificate, key: PEM files, the former with all between it and the authority.
      ca: PEM file with what agents trust; empty if that is not known here.
      host: that agents dial; empty if that is not known here.

    Raises:
      UsageError: says which file is wrong, and how.
    """
    chain, secret = _read("--certificate", certificate), _read("--key", key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a terminal a key with a passphrase would be waited for.
        server.load_cert_chain(user_path(certificate), user_path(key), password=lambda: "")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--certificate and --key cannot be used: {error}",
            hint="both are PEM files, the key without a passphrase, and it is the certificate's",
        ) from None
    trusted = read_trusted(ca) if ca else chain
    match _fault_in_memory(server, trusted, host):
        case "":
            return secret, chain
        case "issuer":
            raise UsageError(
                f"--ca: nothing in `{ca}` has signed the certificate in `{certificate}`",
                hint="give the certificate of who has signed it, or that certificate itself",
            )
        case "name":
            raise UsageError(
                f"--certificate: that in `{certificate}` is not for `{host}`, which agents dial",
                hint=f"make one with `subjectAltName` for `{host}`, or give the name that it is "
                "for with --listen",
            )
        case "expired":
            raise UsageError(
                f"--certificate: that in `{certificate}` has expired", hint="make a new one"
            )
        case "early":
            raise UsageError(
                f"--certificate: that in `{certificate}` is not valid yet",
                hint="wait, or mend the clock of this host",
            )
        case _:
            raise UsageError(
                f"--certificate: that in `{certificate}` is not to be trusted",
                hint="`openssl verify` may say more",
            )


def read_trusted(ca: str) -> bytes:
    """The certificates that an agent trusts, PEM.

    Raises:
      UsageError: the file has none, or cannot be read.
    """
    data = _read("--ca", ca)
    try:
        _client(data)
    except (ValueError, ssl.SSLError):
        raise UsageError(
            f"--ca: `{ca}` holds no certificate that can be read", hint="name a PEM file"
        ) from None
    return data


def _read(option: str, name: str) -> bytes:
    try:
        return read_bytes(user_path(name), limit_bytes=_MOST_BYTES)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint="name a PEM file") from None


def _client(trusted: bytes | None, *, host: str = "") -> ssl.SSLContext:
    """As gRPC checks a certificate; None takes any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(host) and trusted is not None
    context.set_alpn_protocols(["h2"])
    if trusted is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        # A certificate that is trusted itself need not be an authority's.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=trusted.decode("ascii", "ignore"))
    return context


def _fault_in_memory(server: ssl.SSLContext, trusted: bytes, host: str) -> str:
    """What is wrong with a certificate, a word of `_KINDS`; empty if nothing is."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _client(trusted, host=host)
    near = client.wrap_bio(there, here, server_hostname=host or None)
    far = server.wrap_bio(here, there, server_side=True)
    for _ in range(_STEPS):
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return _OPENSSL_CODES.get(error.verify_code, "other")
            except ssl.SSLError:
                return "other"
    return ""


# Who dials it.


def open_channel(search: str, trusted: bytes | None) -> Any:
    """The channel to a search, which is not there yet.

    Args:
      search: `address:port`.
      trusted: as `read_trusted` gives it; None for a channel that is not encrypted.
    """
    with quiet():
        if trusted is None:
            return grpc.insecure_channel(search, options=wire.OPTIONS)
        credentials = grpc.ssl_channel_credentials(trusted)
        return grpc.secure_channel(search, credentials, options=wire.OPTIONS)


def wait_for(
    channel: Any,
    search: str,
    trusted: bytes | None,
    *,
    wait_s: float,
    say: Callable[[str], object],
) -> bool:
    """Waits until a channel is there.

    Args:
      say: shows a line: that, and for how long, one waits.

    Returns:
      False if nothing answers in time.

    Raises:
      UsageError: the search is there, and there can be no channel: says why. So is the search.
    """
    ready, deadline_s = grpc.channel_ready_future(channel), time.monotonic() + wait_s
    is_told = False
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            ready.result(timeout=max(min(_LOOK_S, left_s), 0.0))
        except grpc.FutureTimeoutError:
            if not is_told:
                say(f"nothing answers at {search} yet; waiting for {max(left_s, 0):.0f} s")
                is_told = True
            if fault := _fault_of(search, trusted):
                ready.cancel()
                _tell(search, fault)
                kind, host = _KINDS[fault], _host_of(search)
                raise UsageError(
                    kind.said.format(search=search, host=host), hint=kind.hint.format(host=host)
                ) from None
            if left_s <= _LOOK_S:
                ready.cancel()
                return False
        else:
            return True


def told_by(message: Message) -> str:
    """What the first message of somebody says who hangs up, for people; empty if it is another."""
    kind = _KINDS.get(str(message.get("turns_away", "")))
    return kind.told if kind is not None else ""


def _host_of(search: str) -> str:
    return wire.check_address(search, port_needed=True)[0].strip("[]")


@contextmanager
def _asking(search: str, context: ssl.SSLContext) -> Generator[ssl.SSLSocket]:
    host, port = wire.check_address(search, port_needed=True)
    name = host.strip("[]")
    with (
        socket.create_connection((name, port), timeout=_PROBE_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as asked,
    ):
        yield asked


def _fault_of(search: str, trusted: bytes | None) -> str:
    """Why there is no channel, a word of `_KINDS`; empty if that cannot be told, or there is none:
    the search may come later."""
    try:
        with _asking(search, _client(trusted, host=_host_of(search))):
            return "plain" if trusted is None else ""
    except ssl.SSLCertVerificationError as error:
        return _OPENSSL_CODES.get(error.verify_code, "other")
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError as error:
        # What HTTP/2 says first is no TLS; who speaks TLS, and not with us, says so in an alert.
        is_plain = trusted is not None and "ALERT" not in str(error.reason)
        return "encrypted" if is_plain else ""
    except OSError:
        return ""


def _tell(search: str, fault: str) -> None:
    """Tells the search why somebody does not come, if it can be told."""
    # Through one that has expired, gRPC cannot: that the search sees by itself.
    with contextlib.suppress(OSError, ValueError, grpc.RpcError):
        channel = open_channel(search, None) if fault == "encrypted" else _open_to_any(search)
        with channel:
            call = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
            said = iter([dumps({"turns_away": fault}).encode()])
            for _ in call(said, timeout=_PROBE_S, wait_for_ready=True):
                pass


def _open_to_any(search: str) -> Any:
    """A channel to a search with whatever certificate it has: for nothing that is secret."""
    with _asking(search, _client(None)) as asked:
        shown = asked.getpeercert(binary_form=True) or b""
    pem = ssl.DER_cert_to_PEM_cert(shown).encode()
    with _asking(search, _client(pem)) as asked:
        names = (asked.getpeercert() or {}).get("subjectAltName", ())
    given: Any = names[0][1] if names else _host_of(search)
    name = str(given).replace("*", "any", 1)
    with quiet():
        return grpc.secure_channel(
            search,
            grpc.ssl_channel_credentials(pem),
            options=(*wire.OPTIONS, ("grpc.ssl_target_name_override", name)),
        )


@contextmanager
def quiet() -> Generator[None]:
    """While the body runs, gRPC may be used for the first time, which decides what it prints.

    It would print lines for everybody who hangs up on a certificate, into whatever is shown there.
    """
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        # Not for the workers, whose jax has a gRPC of its own.
        os.environ.pop(_VERBOSITY, None)
