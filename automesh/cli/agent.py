"""`automesh agent`: serves a search that runs on another host."""

from __future__ import annotations

from typing import Annotated

import typer

from automesh.errors import UsageError
from automesh.texts.user_text import check_text
from automesh.units import parse_duration

HELP = """Serve a search on another host with the devices of this one, until it ends.

ADDRESS is what the search listens at: 10.0.0.1:8600. The agent dials it, starts processes on
this host when the search asks for them, and ends them and itself when the search ends, is lost,
or says so. Start one on each host, as training is started there, in the folder in which you
would train: the script must lie under the same path on all hosts.

Search and agents know each other by a token, which all of them have: without one nothing runs.
Others can read a command, so it comes from the environment:

\b
  AUTOMESH_TOKEN=TOKEN        a variable of the environment
  AUTOMESH_TOKEN_FILE=FILE    a file of mode 0600

\b
Examples:
  (umask 077; openssl rand -hex 32 > ~/automesh-token)      once, for all
  export AUTOMESH_TOKEN_FILE=~/automesh-token
  automesh search train.py --hosts 2 --listen 10.0.0.1:8600     on one host
  automesh agent 10.0.0.1:8600                                  on both

\b
Exit codes:
  0 the search has ended   2 refused, lost, or nothing answers
"""


def agent(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="Of the search: its --listen.", show_default=False),
    ],
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of this host in messages; by default its own."),
    ] = "",
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait for the search to be there.")
    ] = "1m",
) -> None:
    from automesh.launch.wire import check_address

    check_address(address, port_needed=True)
    check_text(name)
    try:
        wait_s = parse_duration(wait)
    except UsageError as error:
        raise UsageError(f"--wait: {error.message}", hint=error.hint) from None
    # gRPC takes a third of a second to import, which a wrong word does not wait for.
    from automesh.launch.agent import serve_search

    serve_search(address, name=name, wait_s=wait_s)
