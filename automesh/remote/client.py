"""HTTP to a service: with its token, within bounds, never in the clear over a network."""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

from automesh.errors import UsageError
from automesh.limits import REMOTE_ANSWER_BYTES
from automesh.remote.credentials import token_for
from automesh.texts.storage_url import masked
from automesh.texts.user_text import check_text
from automesh.units import format_bytes

_WAIT_S = 60.0
_EVENTS_WAIT_S = 45.0  # three times as long as a service is ever silent
_EVENT_BYTES = 16 * 2**20
_PORTS = {"http": 80, "https": 443}


class Unreachable(UsageError):
    """Nobody answers, or the connection broke: it may be different in a moment."""


class RefusedRequest(UsageError):
    """The service answered that it will not.

    Attributes:
      status: of HTTP.
    """

    def __init__(self, message: str, *, hint: str = "", status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a service has answered; names of headers in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises UsageError if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise UsageError("the service has not answered with JSON", hint=_IS_IT) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A server-sent event."""

    kind: str
    data: str
    number: str


BUSY = (429, 503)
"""What a service answers who is to ask again later."""
_IS_IT = "is an `automesh serve` at this address?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A service by its address.

    Attributes:
      url: without a slash at its end.
    """

    url: str
    token: str = field(repr=False)
    is_local: bool

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = REMOTE_ANSWER_BYTES,
    ) -> Answer:
        """Sends a request and reads its answer.

        Args:
          most_bytes: that are read of it.

        Raises:
          Unreachable: nobody answers.
          RefusedRequest: the service refuses it; says what the service says.
          UsageError: its answer is larger than `most_bytes`.
        """
        with self._open(method, path, body, headers or {}, _WAIT_S) as reply:
            try:
                data = reply.read(most_bytes + 1)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
            if len(data) > most_bytes:
                raise UsageError(
                    f"{self.url} answers with more than {format_bytes(most_bytes)}, which is more "
                    "than what is asked for can have",
                    hint=_IS_IT,
                )
            names = {name.lower(): value for name, value in reply.headers.items()}
            return Answer(status=reply.status, headers=names, body=data)

    def events(self, path: str, last: str) -> Iterator[Event]:
        """The events of a stream, until it ends.

        Args:
          last: number of the event that one has; empty for none.

        Raises:
          Unreachable, RefusedRequest: as `ask`.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last else {})}
        with self._open("GET", path, None, headers, _EVENTS_WAIT_S) as reply:
            try:
                yield from read_events(reply)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None

    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], wait_s: float
    ) -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.url}{path}", data=body, method=method)
        for name, value in headers.items():
            request.add_header(name, value)
        # Not with a request that was sent elsewhere.
        request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        # A proxy of the environment is none for this machine.
        proxies = [urllib.request.ProxyHandler({})] if self.is_local else []
        opener = urllib.request.build_opener(_NoRedirects, *proxies)
        try:
            return opener.open(request, timeout=wait_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from None

    def _refusal(self, error: urllib.error.HTTPError) -> UsageError:
        detail, hint = "", ""
        with suppress(
            OSError, ValueError, RecursionError, AttributeError, http.client.HTTPException
        ):
            said = json.loads(error.read(2**16))
            detail, hint = str(said.get("detail", "")), str(said.get("hint", ""))
        text = detail or f"the service answered {error.code}"
        return RefusedRequest(f"{self.url}: {masked(text)}", hint=hint, status=error.code)

    def _lost(self, error: Exception) -> UsageError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UsageError(
                f"{self.url}: its certificate is not trusted: {reason.verify_message}",
                hint="let SSL_CERT_FILE name the certificate of who signed it",
            )
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        return Unreachable(f"{self.url} cannot be reached: {text}", hint=_IS_IT)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A service sends nobody elsewhere: who does is something else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def read_events(lines: IO[bytes]) -> Iterator[Event]:
    """The events in a stream.

    Raises:
      OSError: the stream broke, or an event is larger than any that a service sends.
    """
    kind, data, number = "message", list[str](), ""
    while line := lines.readline(_EVENT_BYTES):
        if len(line) >= _EVENT_BYTES:
            raise OSError("an event without an end")
        text = line.decode(errors="replace").rstrip("\r\n")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if not text:
            if data:
                yield Event(kind=kind, data="\n".join(data), number=number)
            kind, data = "message", []
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id":
            number = value


def open_server(url: str) -> tuple[Server, str]:
    """The service that a URL leads to, with its token, and the path behind its address.

    Raises:
      UsageError: no URL, one without TLS over a network, or there is no token.
    """
    parts = _split(check_text(url))
    is_local = _is_this_machine(parts.hostname or "")
    if parts.scheme == "http" and not is_local:
        raise UsageError(
            f"`{masked(url)}` would send the token over the network in the clear",
            hint="use https://",
        )
    port = parts.port or _PORTS[parts.scheme]
    path = parts.path.rstrip("/") + (f"?{parts.query}" if parts.query else "")
    token = token_for(port, is_local=is_local)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token for the service has characters that none has")
    base = f"{parts.scheme}://{parts.netloc}"
    return Server(url=base, token=token, is_local=is_local), path


def _split(url: str) -> SplitResult:
    wrong = UsageError(
        f"`{masked(url)}` is no address of a service", hint="write `https://mesh.example.com`"
    )
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise wrong from None
    if not is_plain or parts.username is not None or not url.isascii() or not url.isprintable():
        raise wrong
    if any(char in url for char in ' <>\\^`{|}"') or len(url) > 2_000:
        raise wrong
    return parts


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
