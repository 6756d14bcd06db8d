"""Rules that a service hands out."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import urlsplit

from automesh.errors import UsageError
from automesh.limits import PEOPLE_FILE_BYTES
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import parse_rules
from automesh.remote.client import open_server


def load_rules(url: str) -> Rules:
    """Reads the rule file at a URL of a service.

    Raises:
      UsageError: nobody answers, the token is not taken, or it is no rule file.
    """
    server, path = open_server(url)
    answer = server.ask("GET", path, most_bytes=PEOPLE_FILE_BYTES)
    try:
        text = answer.body.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{url} is not UTF-8 text") from None
    name = PurePosixPath(urlsplit(url).path).name or "rules.toml"
    return parse_rules(text, name=name)
