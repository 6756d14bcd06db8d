"""The addresses that a service listens at, its host names, and its certificate."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from pathlib import Path

from automesh.errors import UsageError
from automesh.launch.wire import check_address

DEFAULT_PORT = 8700
BACKLOG = 512
# ports that are tried: a port may be free at one address of a host and not at another
_FREE_PORTS = 20


def bound(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen at all addresses of a host, at one port.

    Args:
      port: 0 for any port that is free at all of them.

    Raises:
      UsageError: there is no such host, or another program listens there.
    """
    sockets: list[socket.socket] = []
    reason = "it has no address of this machine"
    for _ in range(1 if port else _FREE_PORTS):
        try:
            sockets = _bound_at_all(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
        if sockets:
            return sockets
    raise UsageError(
        f"--listen: `{in_url(host)}:{port}` cannot be listened at: {reason.lower()}",
        hint="choose another address or port with --listen",
    )


def _bound_at_all(host: str, port: int) -> list[socket.socket]:
    """Returns sockets as `bound` does.

    Raises:
      OSError: a socket cannot listen at one of the addresses, or none of them belongs to this
        machine.
    """
    missing = OSError(errno.EADDRNOTAVAIL, "it has no address of this machine")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, _, _, _, address in dict.fromkeys(found):
            at = (address[0], port, *address[2:])
            try:
                one = socket.create_server(at, family=family, backlog=BACKLOG)
            except OSError as error:
                # `localhost` has an IPv6 address even where the system has no IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            sockets.append(stack.enter_context(one))
            port = one.getsockname()[1]
        if not sockets:
            raise missing
        stack.pop_all()
    return sockets


def read_address(text: str) -> tuple[str, int]:
    """Reads the host and the port of `--listen`; port 0 stands for any free one.

    Raises:
      UsageError: the text is no address.
    """
    host, port = check_address(text, port_needed=False)
    return host.strip("[]"), port if _has_port(text) else DEFAULT_PORT


def read_proxy(text: str) -> str:
    """Reads the address of a proxy.

    Raises:
      UsageError: the text is no address.
    """
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        raise UsageError(
            f"--proxy: `{text}` is no address of a proxy", hint="write it as `10.0.0.5`"
        ) from None


def _has_port(text: str) -> bool:
    return ":" in text.rpartition("]")[2]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str, port: int, scheme: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the allowed values of the `Host` header of a request, in lower case.

    Raises:
      UsageError: a name is one that no host can have.
    """
    for name in names:
        label = name.rpartition(":")[0] if _has_port(name) else name
        if not label or any(not (char.isalnum() or char in ".-_[]:") for char in label):
            raise UsageError(
                f"--hostname: `{name}` is no name of a host", hint="write `mesh.example.com`"
            )
    known = {in_url(host)}
    if is_loopback(host):
        known |= {"localhost", "127.0.0.1", "[::1]"}
    usual = {"http": 80, "https": 443}[scheme]
    with_ports = {f"{name}:{port}" for name in known} | (known if port == usual else set())
    given = {name.lower() for name in names}
    given |= {f"{name.lower()}:{port}" for name in names if not _has_port(name)}
    return tuple(sorted(with_ports | given))


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Returns the TLS context for connections; None without a certificate.

    Raises:
      UsageError: one of the two files is missing, or they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("--certificate and --key are given together, or neither of them")
    for option, path in (("--certificate", certificate), ("--key", key)):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UsageError(f"{option}: `{path}` is no file that can be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # For a key with a passphrase, the library would wait for input that nobody can type.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--certificate and --key cannot be used: {error}",
            hint="both are PEM files, the key without a passphrase",
        ) from None
    return context
