"""An HTTP client for a service: sends its token, bounds every wait and size, and uses TLS over a
network."""

from __future__ import annotations

import http.client
import ipaddress
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from typing import IO
from urllib.parse import SplitResult, urlsplit

from automesh import limits
from automesh.errors import UsageError
from automesh.texts.storage_url import masked
from automesh.texts.terminal import clean
from automesh.texts.user_text import check_text
from automesh.units import format_bytes
from automesh_service.remote.answers import IS_IT, Answer, Said, WrongAnswer, check_type, read
from automesh_service.remote.connection import Pace, TooMuch, open_answer, trouble_of
from automesh_service.remote.credentials import token_for
from automesh_service.remote.patience import Patience, RefusedRequest, Unreachable

_EVENTS_WAIT_S = 45.0  # three times the longest silence of a service's stream
_REFUSAL_BYTES = 2**16
_PORTS = {"http": 80, "https": 443}
# characters of an event's number, which is sent back in a header
_NUMBER = re.compile(r"[\x21-\x7e]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A server-sent event."""

    kind: str
    data: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A service by its address.

    Attributes:
      url: its address, without a slash at the end.
      patience: how long to wait for the service, and how to report that.
    """

    url: str
    token: str = field(repr=False)
    is_local: bool
    patience: Patience = field(default_factory=Patience, repr=False, compare=False)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = limits.REMOTE_SMALL_BYTES,
    ) -> Answer:
        """Sends a request and reads its answer.

        Args:
          most_bytes: the most bytes that are read of the answer.

        Raises:
          Unreachable: nobody answers, or the answer comes too slowly.
          WrongAnswer: its answer is larger than `most_bytes`.
          RefusedRequest: the service refuses the request; has the reason that the service gives.
          UsageError: its certificate is not trusted.
        """
        send_s = limits.REMOTE_WAIT_S + len(body or b"") / limits.REMOTE_LEAST_BYTES_PER_S
        pace = Pace(head_s=limits.REMOTE_WAIT_S, most_bytes=most_bytes, send_s=send_s)
        most_s = limits.REMOTE_CONNECT_S + send_s + limits.REMOTE_WAIT_S
        with (
            self.patience.news(self.url, most_s),
            self._open(method, path, body, headers or {}, pace) as reply,
        ):
            try:
                data = reply.read(most_bytes + 1)
                if len(data) > most_bytes:
                    raise TooMuch
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error, pace) from None
            return Answer(status=reply.status, headers=_named(reply.headers), body=data)

    def events(self, path: str, last: str) -> Iterator[Event]:
        """Yields the events of a stream, until it ends.

        Args:
          last: number of the last event that the caller has; empty for none.

        Raises:
          Unreachable, RefusedRequest: as for `ask`.
          WrongAnswer: the answer is no stream of events.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last else {})}
        pace = Pace(head_s=_EVENTS_WAIT_S, most_bytes=limits.REMOTE_EVENT_BYTES, is_stream=True)
        most_s = limits.REMOTE_CONNECT_S + _EVENTS_WAIT_S
        with self.patience.news(self.url, most_s):
            reply = self._open("GET", path, None, headers, pace)
        with reply:
            check_type(_named(reply.headers), "text/event-stream")
            try:
                yield from read_events(reply)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error, pace) from None

    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], pace: Pace
    ) -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.url}{path}", data=body, method=method)
        for name, value in headers.items():
            request.add_header(name, value)
        # A request that was redirected does not get the token.
        request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            found = open_answer(request, pace, is_local=self.is_local)
        except urllib.error.HTTPError as error:
            self.patience.has_answered = True
            with error:
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error, pace) from None
        self.patience.has_answered = True
        return found

    def _refusal(self, error: urllib.error.HTTPError) -> UsageError:
        said = Said()
        # The body that explains a refusal may come from any program; the status is reported in any
        # case.
        with suppress(OSError, http.client.HTTPException, ValueError):
            said = read(error.read(_REFUSAL_BYTES), Said)
        text = said.detail or _words_of(error.code)
        return RefusedRequest(
            f"{self.url}: {masked(text)}", hint=masked(said.hint), status=error.code
        )

    def _lost(self, error: Exception, pace: Pace) -> UsageError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UsageError(
                f"{self.url}: its certificate is not trusted: {clean(reason.verify_message)}",
                hint="let SSL_CERT_FILE name the certificate of who signed it",
            )
        if isinstance(reason, TooMuch):
            return WrongAnswer(
                f"{self.url} answers with more than {format_bytes(pace.most_bytes)}, which is more "
                "than what is asked for can have",
                hint=IS_IT,
            )
        trouble = trouble_of(error, pace, is_tls=self.url.startswith("https"))
        return Unreachable(
            f"{self.url} cannot be reached: {trouble.said}",
            hint=trouble.hint or IS_IT,
            is_lasting=trouble.is_lasting,
        )


def _named(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _words_of(status: int) -> str:
    if 300 <= status < 400:
        return f"it sends its clients to another address ({status}), which no service does"
    return f"the service answered {status}"


def read_events(lines: IO[bytes]) -> Iterator[Event]:
    """Yields the events in a stream.

    Raises:
      OSError: the stream broke, or an event is larger than any that a service sends.
    """
    kind, data, number, size = "message", list[str](), "", 0
    while line := lines.readline(limits.REMOTE_EVENT_BYTES):
        size += len(line)
        if size >= limits.REMOTE_EVENT_BYTES:
            raise TooMuch
        text = line.decode(errors="replace").rstrip("\r\n")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if not text:
            if data:
                yield Event(kind=kind, data="\n".join(data), number=number)
            kind, data, size = "message", [], 0
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif not name:  # A comment: the service sends it to show that it still runs.
            size -= len(line)
        elif name == "id" and _NUMBER.fullmatch(value):
            number = value


def open_server(url: str, say: Callable[[str], None] | None = None) -> tuple[Server, str]:
    """Returns the service that a URL leads to, with its token, and the path behind its address.

    Args:
      say: shows a line while the service is waited for; None: the lines are warnings in the log.

    Raises:
      UsageError: the URL is none, or leads over a network without TLS; or there is no token.
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
    patience = Patience() if say is None else Patience(say=say)
    return Server(url=base, token=token, is_local=is_local, patience=patience), path


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
