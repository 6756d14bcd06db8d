"""HTTP with bounds on every wait and every size, because the other side may be any program.

`urllib` bounds how long a socket may be silent. A server that sends a byte a second, or endless
interim answers, headers, chunks or trailers, is never silent, and a command would wait for ever. So
this module times and counts the bytes below the parser of HTTP.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from automesh import limits
from automesh.texts.terminal import clean

_SHOWN_CHARS = 200
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
# kind and version of a TLS record, received where a status line should be
_OF_TLS = ("\x15\x03", "\x16\x03")
_NO_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class TooMuch(OSError):
    """More bytes arrived than the answer can have."""


class TooSlow(OSError):
    """The bytes arrive so slowly that the answer would never end."""


@dataclass(kw_only=True)
class Pace:
    """The limits that remain for one answer, in seconds and bytes.

    Attributes:
      head_s: seconds for the head of the answer, after the request was sent.
      most_bytes: the most bytes of the body.
      send_s: seconds for the request to be taken.
      is_stream: whether the body has no end; then only each silence in it is bounded.
      is_connected: whether the other side has accepted the connection.
    """

    head_s: float
    most_bytes: int
    send_s: float = limits.REMOTE_WAIT_S
    is_stream: bool = False
    is_connected: bool = False
    clock: Callable[[], float] = time.monotonic
    _since_s: float = 0.0
    _received: int = 0
    _is_head: bool = True

    def sent(self) -> None:
        """Starts the time for the head: the request is on its way."""
        self._since_s, self._received, self._is_head = self.clock(), 0, True

    def body(self) -> None:
        """Starts the time for the body: the head is here."""
        self._since_s, self._received, self._is_head = self.clock(), 0, False

    def left_s(self) -> float:
        """Returns how long the next part may take.

        Raises:
          TooSlow: no time is left.
        """
        if self.is_stream and not self._is_head:
            return self.head_s
        may_take_s = self.head_s
        if not self._is_head:
            may_take_s += self._received / limits.REMOTE_LEAST_BYTES_PER_S
        left_s = self._since_s + may_take_s - self.clock()
        if left_s <= 0:
            raise TooSlow if self._received else TimeoutError
        return left_s

    def received(self, count: int) -> None:
        """Counts bytes that have arrived.

        Raises:
          TooMuch: they are more than the answer can have.
        """
        self._received += count
        most = limits.REMOTE_HEAD_BYTES
        if not self._is_head:
            # The bytes between the parts of a body count as well.
            most += self.most_bytes + self.most_bytes // 2
        if self._received > most and (self._is_head or not self.is_stream):
            raise TooMuch


class _TimedReader(io.RawIOBase):
    """Reads from a socket within the bounds of a pace."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, pace: Pace) -> None:
        super().__init__()
        self._raw, self._sock, self._pace = raw, sock, pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        self._sock.settimeout(self._pace.left_s())
        count = self._raw.readinto(buffer)
        self._pace.received(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *given: Any, pace: Pace, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        buffered: Any = self.fp
        self.fp = io.BufferedReader(_TimedReader(buffered.detach(), sock, pace))


class _Paced(http.client.HTTPConnection):
    """A connection whose answer is read within the bounds of a pace."""

    def __init__(self, *given: Any, pace: Pace, **named: Any) -> None:
        super().__init__(*given, **named)
        self.response_class: Any = partial(_Response, pace=pace)
        self._pace = pace

    def connect(self) -> None:
        self._pace.sent()  # A proxy answers before anything is sent to the service.
        super().connect()
        self._pace.is_connected = True
        self.sock.settimeout(self._pace.send_s)

    def getresponse(self) -> http.client.HTTPResponse:
        self._pace.sent()
        return super().getresponse()


class _PacedTls(_Paced, http.client.HTTPSConnection):
    pass


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Paced, pace=self._pace), req)


class _Tls(urllib.request.HTTPSHandler):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_PacedTls, pace=self._pace), req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a service sends none, so this is another program."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def open_answer(
    request: urllib.request.Request, pace: Pace, *, is_local: bool
) -> http.client.HTTPResponse:
    """Sends a request, and reads the head of its answer.

    Args:
      is_local: whether the request goes to this machine; then a proxy of the environment is not
        used.

    Raises:
      urllib.error.HTTPError: the answer has a status that is no success; its body can be read.
      OSError, http.client.HTTPException, ValueError: there is no answer; `trouble_of` says why.
    """
    opener = urllib.request.OpenerDirector()
    # Without handlers for `file:` and `ftp:`, and with certificates loaded only for `https:`, since
    # loading them takes as long as a request.
    handlers = [
        _NoRedirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Tls(pace) if request.type == "https" else _Plain(pace),
    ]
    if not is_local:
        handlers += [urllib.request.ProxyHandler(), _Plain(pace)]
    for handler in handlers:
        opener.add_handler(handler)
    try:
        return opener.open(request, timeout=limits.REMOTE_CONNECT_S)
    finally:
        pace.body()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The reason why there is no answer, in our own words: text that came instead is never quoted
    as it is.

    Attributes:
      hint: what to do about it; empty if the usual one fits.
      is_lasting: whether a second try would fail in the same way, until somebody changes something.
    """

    said: str
    hint: str = ""
    is_lasting: bool = False


def trouble_of(error: Exception, pace: Pace, *, is_tls: bool) -> Trouble:
    """Returns the reason why an answer could not be read."""
    reason = getattr(error, "reason", error)
    cause = reason if isinstance(reason, Exception) else error
    if isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError):
        hint = "" if is_tls else "if it has a certificate, its address begins with https://"
        return Trouble(said="the connection was closed without an answer", hint=hint)
    if isinstance(cause, ssl.SSLError):
        return _of_tls(cause)
    if isinstance(cause, TimeoutError):
        return _of_silence(pace)
    return _of_system(cause) if isinstance(cause, OSError) else _of_http(cause)


def _of_tls(error: ssl.SSLError) -> Trouble:
    if error.reason in _NO_TLS:
        hint = "a service of this machine without a certificate has an address with http://"
        return Trouble(said="what listens there speaks no TLS", hint=hint, is_lasting=True)
    return Trouble(said=f"TLS has failed: {clean(str(error.reason or error), _SHOWN_CHARS)}")


def _of_silence(pace: Pace) -> Trouble:
    if pace.is_connected:
        return Trouble(said=f"nothing has come back for {pace.head_s:.0f} s")
    return Trouble(
        said=f"nothing has come back for {limits.REMOTE_CONNECT_S:.0f} s, not even a refusal",
        hint="is the port right, and does a firewall let it through?",
    )


def _of_system(error: OSError) -> Trouble:
    match error:
        case TooSlow():
            return Trouble(said="what it answers arrives so slowly that it would not end")
        case ConnectionRefusedError():
            return Trouble(said="nobody listens there")
        case socket.gaierror() if error.errno in _NO_NAME:
            return Trouble(said="no host has this name", is_lasting=True)
        case socket.gaierror():
            return Trouble(said="the name of the host cannot be looked up now")
        case _:
            text = error.strerror or str(error) or type(error).__name__
            return Trouble(said=clean(text, _SHOWN_CHARS).lower())


def _of_http(error: Exception) -> Trouble:
    if isinstance(error, http.client.IncompleteRead):
        return Trouble(said="its answer broke off")
    if isinstance(error, http.client.BadStatusLine) and str(error.args[0]).startswith(_OF_TLS):
        hint = "its address begins with https://"
        return Trouble(said="what listens there speaks TLS", hint=hint, is_lasting=True)
    said = "what answers there does not speak HTTP as a service does"
    return Trouble(said=said, is_lasting=True)
