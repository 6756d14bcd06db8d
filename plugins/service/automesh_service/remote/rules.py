"""Rules that are loaded from a service."""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from automesh.limits import PEOPLE_FILE_BYTES
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import parse_rules
from automesh_service.remote.answers import Answer
from automesh_service.remote.client import Server, open_server
from automesh_service.remote.patience import BUSY, RefusedRequest

# within this time a service that was started again has read its studies
_BACK_S, _PAUSE_S = 30.0, 1.0
_TYPES = ("application/toml", "text/plain", "application/octet-stream")


def load_rules(url: str) -> Rules:
    """Reads the rule file at a URL of a service.

    Raises:
      UsageError: nobody answers, the service refuses the token, or the answer is no rule file; or
        the service is busy for half a minute.
    """
    server, path = open_server(url)
    text = _ask(server, path).text(*_TYPES)
    name = PurePosixPath(urlsplit(url).path).name or "rules.toml"
    return parse_rules(text, name=name)


def _ask(server: Server, path: str) -> Answer:
    """Asks again while the service is busy: a training must not fail because the service was
    restarted."""
    end_s = time.monotonic() + _BACK_S
    while True:
        try:
            return server.ask("GET", path, most_bytes=PEOPLE_FILE_BYTES)
        except RefusedRequest as error:
            if error.status not in BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_PAUSE_S)
