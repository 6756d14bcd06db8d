"""`automesh token`: the tokens of a service and their rights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import read_option
from automesh.errors import UsageError
from automesh.texts.user_text import check_text, user_path
from automesh.units import parse_duration

HELP = """Make a token for a service on this host, list all, or end one.

NAME is the person or program that gets the token, and owns all that is submitted with any token
of this name. The token is printed once, on stdout; the service keeps a hash of it. Scopes:

\b
  read      see studies, pages and rules, and watch
  submit    also submit searches, which run as the account of the service
            or of an agent; see one's own
  agent     take submissions, with their code, and send their results
  admin     see and change everything, read the audit

To use it, set AUTOMESH_SERVER_TOKEN, or let AUTOMESH_SERVER_TOKEN_FILE name a file of mode 0600
that has it.

\b
Examples:
  automesh token ann --scope submit --expires 90d
  automesh token grafana --scope read
  automesh token gpu-host-7 --scope agent
  automesh token --list
  automesh token --revoke 3fa9c1d27b60
"""


def token(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Person or program that gets the token.", show_default=False
        ),
    ] = None,
    scope: Annotated[
        str, typer.Option(metavar="SCOPE", help="read, submit, agent or admin.")
    ] = "read",
    expires: Annotated[
        str,
        typer.Option(metavar="TIME", help="Lifetime, as 90d; by default a year."),
    ] = "365d",
    home: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the service.")] = Path(
        "automesh-service"
    ),
    list_all: Annotated[bool, typer.Option("--list", help="List all tokens.")] = False,
    revoke: Annotated[
        str,
        typer.Option(
            metavar="NUMBER", help="End a token, by its number in --list.", show_default=False
        ),
    ] = "",
) -> None:
    from automesh_service.submissions.audit import Audit
    from automesh_service.submissions.database import Database
    from automesh_service.submissions.home import open_home
    from automesh_service.submissions.tokens import SCOPES, Tokens, check_name

    words = [("--scope", scope), ("--revoke", revoke), ("NAME", name or "")]
    for option, text in words:
        read_option(option, check_text, text)
    if sum((name is not None, list_all, bool(revoke))) != 1:
        raise UsageError("give a NAME to make a token, or --list, or --revoke NUMBER")
    if name is not None:
        check_name(name)
    lasts_s = read_option("--expires", parse_duration, expires)
    folder = read_option("--home", user_path, str(home))
    if scope not in SCOPES:
        raise UsageError(f"--scope: `{scope}` is no scope", hint=f"there are {', '.join(SCOPES)}")
    if name is None and not folder.is_dir():
        raise UsageError(
            f"--home: there is no service in `{folder}`",
            hint="name the folder that `automesh serve` was started with",
        )
    database = Database(open_home(folder).database)
    try:
        tokens, audit = Tokens(database), Audit(database)
        if name is not None:
            made = tokens.make(name, scope, lasts_s)
            audit.note("token made", who=name, subject=made.split("_")[1], said=scope)
            sys.stdout.write(f"{made}\n")
        elif revoke:
            read_option("--revoke", tokens.revoke, revoke)
            audit.note("token revoked", subject=revoke)
        for one in tokens.listed() if list_all else ():
            until = "never" if one.expires_s is None else _day(one.expires_s)
            line = f"{one.number}  {one.scope:6}  {one.state:7}  until {until:10}  {one.name}"
            sys.stdout.write(f"{line}\n")
    finally:
        database.close()


def _day(at_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at_s))
