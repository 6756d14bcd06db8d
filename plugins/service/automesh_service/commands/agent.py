"""`automesh agent --server`: runs submissions of a service on this host."""

from __future__ import annotations

import sys

from automesh.cli.options import read_option
from automesh.errors import UsageError
from automesh.plugins.service import AskedAgent
from automesh.texts.user_text import user_path


def serve_asked(asked: AskedAgent) -> None:
    """Runs submissions until Ctrl-C.

    Raises:
      UsageError: an option is wrong, or the service refuses the token.
    """
    # Imported here, because a search with --server needs no database.
    from automesh_service.remote.agent import AgentOptions, serve_agent
    from automesh_service.remote.client import open_server
    from automesh_service.submissions.order import check_label, check_pattern

    if asked.name:
        read_option("--name", check_label, asked.name)
    for text in asked.takes:
        read_option("--takes", check_pattern, text)
    for text in asked.has:
        read_option("--has", check_label, text)
    place = read_option("--folder", user_path, str(asked.folder))
    if place.exists() and not place.is_dir():
        raise UsageError(f"--folder: `{place}` is no folder")
    service, path = read_option("--server", lambda text: open_server(text, _say), asked.server)
    if path:
        raise UsageError(f"--server: `{asked.server}` has a path behind the address of the service")
    options = AgentOptions(name=asked.name, takes=asked.takes, has=asked.has, folder=place)
    serve_agent(service, options, _say)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
