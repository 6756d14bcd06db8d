"""`automesh hosts`: what the agents of a running search do."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from automesh.cli.options import print_report

HELP = """Show the hosts of a search that runs: their cores, memory and load, and what their
processes do.

ADDRESS is what the search listens at, as for `automesh agent`, and the token is the same: in
AUTOMESH_TOKEN, or in a file of mode 0600 that AUTOMESH_TOKEN_FILE names.

\b
Examples:
  automesh hosts 10.0.0.1:8600
  automesh hosts 10.0.0.1:8600 --json
"""


def hosts(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="Address of the search: its --listen.", show_default=False
        ),
    ],
    ca: Annotated[
        str,
        typer.Option(metavar="FILE", help="PEM file, as for `automesh agent`.", show_default=False),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    from automesh.launch.secret import read_token
    from automesh.launch.wire import check_address

    check_address(address, port_needed=True)
    # gRPC takes a third of a second to import, which a wrong word does not wait for.
    trusted = None
    if ca:
        from automesh.launch.certificates import read_trusted

        trusted = read_trusted(ca)
    token = read_token(os.environ)
    from automesh.launch.asking import ask
    from automesh.report.pages.hosts import report_of

    found = ask(address, token, trusted=trusted, say=lambda line: sys.stderr.write(f"{line}\n"))
    print_report(report_of(found), as_json=as_json)
