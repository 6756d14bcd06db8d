"""Sets up the encrypted channel of a search and its agents, and finds what is wrong if it fails.

The search has a certificate with its key, and agents have certificates that they trust; with these
gRPC makes an encrypted channel (TLS). The token still proves that an agent belongs to the search,
with or without encryption.

gRPC keeps waiting for a channel that is not possible, and does not report why; and a server does
not learn that a client refused its certificate. So a client that gets no channel finds the reason
with Python's own TLS. It sends the search one word about it, through a channel that accepts any
certificate and carries nothing secret. The search checks its own certificate before it waits for
agents.
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
_LOOK_S = 1.0  # A possible channel is ready by then, unless the search is not running.
_PROBE_S = 3.0
_STEPS = 10  # Most steps of a handshake in memory; TLS 1.3 needs three.
_VERBOSITY = "GRPC_VERBOSITY"
_OPENSSL_CODES = {
    **dict.fromkeys((2, 18, 19, 20, 21), "issuer"),
    **dict.fromkeys((62, 64), "name"),
    9: "early",
    10: "expired",
}
"""Our words for `SSLCertVerificationError.verify_code`: OpenSSL's X509_V_ERR_..., x509_vfy.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One reason why there is no encrypted channel.

    Attributes:
      message: message for the client, with places for `{search}` and its `{host}`.
      hint: what to do.
      peer_message: message for the search about that client.
    """

    message: str
    hint: str
    peer_message: str


_KINDS = {
    "issuer": _Kind(
        message="none of the certificates in --ca has signed that of the search at {search}",
        hint="give --ca the certificate that signed the search's --certificate, or that "
        "certificate itself",
        peer_message="no certificate in its --ca has signed that of this search",
    ),
    "name": _Kind(
        message="the certificate of the search at {search} is not for `{host}`",
        hint="dial a name that the certificate is for, or make one with `subjectAltName` for "
        "`{host}`",
        peer_message="it has dialled a name that the certificate of this search is not for",
    ),
    "expired": _Kind(
        message="the certificate of the search at {search} has expired",
        hint="make a new one; if it has not, the clock of this host is wrong",
        peer_message="it found that the certificate of this search has expired",
    ),
    "early": _Kind(
        message="the certificate of the search at {search} is not valid yet",
        hint="wait; if it is, the clock of this host is wrong",
        peer_message="it found that the certificate of this search is not valid yet",
    ),
    "plain": _Kind(
        message="the search at {search} encrypts its channel, and no --ca was given",
        hint="give --ca the certificate that signed the search's --certificate",
        peer_message="it has no --ca, and this search has a --certificate",
    ),
    "encrypted": _Kind(
        message="the search at {search} does not encrypt its channel, and --ca was given",
        hint="start the search with --certificate and --key, or leave --ca out",
        peer_message="it has a --ca, and this search no --certificate",
    ),
    "other": _Kind(
        message="the certificate of the search at {search} cannot be trusted",
        hint="`openssl verify -CAfile CA CERTIFICATE` may say more",
        peer_message="it does not trust the certificate of this search",
    ),
}


# The side of the search.


def read_identity(certificate: str, key: str, ca: str, *, host: str) -> tuple[bytes, bytes]:
    """Reads the key and certificates of a search, and checks them as an agent would.

    Args:
      certificate, key: PEM files; the first also holds the chain up to the authority.
      ca: PEM file with the certificates that agents trust; empty if not known here.
      host: the host that agents dial; empty if not known here.

    Raises:
      UsageError: says which file is wrong, and how.
    """
    chain, secret = _read("--certificate", certificate), _read("--key", key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password: Python would ask the terminal for the passphrase of a key.
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
                hint="give the certificate that signed it, or that certificate itself",
            )
        case "name":
            raise UsageError(
                f"--certificate: `{certificate}` is not for `{host}`, which agents dial",
                hint=f"make one with `subjectAltName` for `{host}`, or give the name that it is "
                "for with --listen",
            )
        case "expired":
            raise UsageError(f"--certificate: `{certificate}` has expired", hint="make a new one")
        case "early":
            raise UsageError(
                f"--certificate: `{certificate}` is not valid yet",
                hint="wait, or correct the clock of this host",
            )
        case _:
            raise UsageError(
                f"--certificate: `{certificate}` cannot be trusted",
                hint="`openssl verify` may say more",
            )


def read_trusted(ca: str) -> bytes:
    """Reads the certificates that an agent trusts, as PEM.

    Raises:
      UsageError: the file holds no certificate or cannot be read.
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
    """Returns a TLS context that checks certificates as gRPC does, or accepts any if `trusted` is
    None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(host) and trusted is not None
    context.set_alpn_protocols(["h2"])
    if trusted is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        # A trusted certificate need not be that of an authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=trusted.decode("ascii", "ignore"))
    return context


def _fault_in_memory(server: ssl.SSLContext, trusted: bytes, host: str) -> str:
    """Finds what is wrong with a certificate, as a key of `_KINDS`; empty if nothing is."""
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


# The side of the agents.


def open_channel(search: str, trusted: bytes | None) -> Any:
    """Opens a channel to a search; it is not connected yet.

    Args:
      search: `address:port`.
      trusted: result of `read_trusted`; None for a channel without encryption.
    """
    with silenced_grpc():
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
    """Waits until a channel is connected.

    Args:
      say: shows a line with the seconds that are left to wait.

    Returns:
      False if nothing answers in time.

    Raises:
      UsageError: the search answers, but no channel is possible; says why. The search gets the same
        reason.
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
                    kind.message.format(search=search, host=host), hint=kind.hint.format(host=host)
                ) from None
            if left_s <= _LOOK_S:
                ready.cancel()
                return False
        else:
            return True


def told_by(message: Message) -> str:
    """Returns the reason in a client's first message if it could not get a channel; empty for other
    messages."""
    kind = _KINDS.get(str(message.get("turns_away", "")))
    return kind.peer_message if kind is not None else ""


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
    """Returns the key in `_KINDS` of the reason why there is no channel; empty if unknown or
    nothing answers yet."""
    try:
        with _asking(search, _client(trusted, host=_host_of(search))):
            return "plain" if trusted is None else ""
    except ssl.SSLCertVerificationError as error:
        return _OPENSSL_CODES.get(error.verify_code, "other")
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError as error:
        # A server without TLS answers with plain HTTP/2; one with TLS that refuses us sends an
        # alert.
        is_plain = trusted is not None and "ALERT" not in str(error.reason)
        return "encrypted" if is_plain else ""
    except OSError:
        return ""


def _tell(search: str, fault: str) -> None:
    """Tells the search why this client gets no channel, if a message can reach it."""
    # gRPC refuses an expired certificate even here; the search finds that by itself.
    with contextlib.suppress(OSError, ValueError, grpc.RpcError):
        channel = open_channel(search, None) if fault == "encrypted" else _open_to_any(search)
        with channel:
            call = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
            message = iter([dumps({"turns_away": fault}).encode()])
            for _ in call(message, timeout=_PROBE_S, wait_for_ready=True):
                pass


def _open_to_any(search: str) -> Any:
    """Opens a channel that accepts any certificate; for messages without secrets only."""
    with _asking(search, _client(None)) as asked:
        shown = asked.getpeercert(binary_form=True) or b""
    pem = ssl.DER_cert_to_PEM_cert(shown).encode()
    with _asking(search, _client(pem)) as asked:
        names = (asked.getpeercert() or {}).get("subjectAltName", ())
    given: Any = names[0][1] if names else _host_of(search)
    name = str(given).replace("*", "any", 1)
    with silenced_grpc():
        return grpc.secure_channel(
            search,
            grpc.ssl_channel_credentials(pem),
            options=(*wire.OPTIONS, ("grpc.ssl_target_name_override", name)),
        )


@contextmanager
def silenced_grpc() -> Generator[None]:
    """Silences gRPC while the body runs; gRPC must be used there for the first time.

    Otherwise gRPC prints a line for each client that refuses the certificate, in the middle of the
    display.
    """
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        # The workers must not inherit this: their jax has a gRPC of its own.
        os.environ.pop(_VERBOSITY, None)
