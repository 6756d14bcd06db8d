"""`automesh agent`: serves a search that runs on another host, or runs what a service has taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import read_option
from automesh.errors import UsageError
from automesh.plugins.service import AskedAgent, find_service
from automesh.texts.user_text import check_text
from automesh.units import parse_duration

HELP = """Serve searches with the devices of this host: one that runs on another host, or those that
people have submitted to a service.

ADDRESS is what a search listens at: 10.0.0.1:8600. The agent dials it, starts processes on
this host when the search asks for them, and ends them and itself when the search ends, is lost,
or says so. Start one on each host, as training is started there, in the folder in which you
would train: the script must lie under the same path on all hosts.

Search and agents know each other by a token, which all of them have: without one nothing runs.
Others can read a command, so it comes from the environment:

\b
  AUTOMESH_TOKEN=TOKEN        a variable of the environment
  AUTOMESH_TOKEN_FILE=FILE    a file of mode 0600

With --server, the agent asks a service (`automesh serve`) for submissions that suit this host,
runs one after the other, and sends on what they say and find, until Ctrl-C. It needs a token of
the scope `agent`, in AUTOMESH_SERVER_TOKEN or the file that AUTOMESH_SERVER_TOKEN_FILE names.
The code of all who may submit there runs as your account.

\b
Examples:
  (umask 077; openssl rand -hex 32 > ~/automesh-token)      once, for all
  export AUTOMESH_TOKEN_FILE=~/automesh-token
  automesh search train.py --hosts 2 --listen 10.0.0.1:8600     on one host
  automesh agent 10.0.0.1:8600                                  on both
  automesh agent --server https://mesh.example.com --has gpu-h100-8

\b
Exit codes:
  0 the search has ended, or Ctrl-C   2 refused, lost, or nothing answers
"""

CA_OPTION = """PEM file by which the agent checks the --certificate of the search: the
certificate of its authority, or the search's own. All messages are encrypted then."""


def agent(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="Address of the search: its --listen.", show_default=False
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of this host in messages; by default its own."),
    ] = "",
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait until the search is there.")
    ] = "1m",
    ca: Annotated[str, typer.Option(metavar="FILE", help=CA_OPTION, show_default=False)] = "",
    server: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Address of a service, instead of ADDRESS.", show_default=False
        ),
    ] = "",
    takes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="With --server: targets to search for, as 'cpu:*'; may be given again. By "
            "default all.",
            show_default=False,
        ),
    ] = None,
    has: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="With --server: what this host has, for submissions that need it; may be given "
            "again.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="With --server: for bundles and studies.")
    ] = Path("automesh-agent"),
) -> None:
    if bool(address) == bool(server):
        raise UsageError("give the ADDRESS of a search, or --server URL of a service")
    check_text(name)
    if server and ca:
        raise UsageError("--ca is for an agent of a search, and --server names a service")
    if server:
        asked = AskedAgent(
            server=server,
            name=name,
            takes=tuple(takes or ("*",)),
            has=tuple(has or ()),
            folder=folder,
        )
        find_service("`automesh agent --server`").serve_agent(asked)
        return
    if takes or has:
        raise UsageError("--takes and --has are for an agent of a service, with --server")
    from automesh.launch.wire import check_address

    check_address(address, port_needed=True)
    wait_s = read_option("--wait", parse_duration, wait)
    # gRPC takes a third of a second to import, which a wrong word does not wait for.
    from automesh.launch.agent import serve_search

    serve_search(address, name=name, wait_s=wait_s, ca=ca)
