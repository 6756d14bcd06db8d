"""`automesh serve`: the studies of a storage over HTTP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import read_option
from automesh.errors import UsageError
from automesh.texts.user_text import check_text, user_path
from automesh.units import parse_duration

HELP = """Serve studies over HTTP: pages, live progress, rules, and searches that others submit.

The service shows the studies under --results (or in --storage), and takes searches from
`automesh submit`: it runs them on this host, one at a time, in separate processes, and on other
hosts by agents that connect (`automesh agent --server`). If it listens at this machine's own
address, which is the default, it makes a token for you and prints the address to open. All other
users need tokens of their own (automesh token --help), and TLS.

Submitted code runs as your account: give the scope `submit` only to people who may log in as you.
Ctrl-C ends the service and its searches; the next service continues them.

docs/service.md has set-ups for one person and for a team, with PostgreSQL, a proxy, backups and
upgrades.

\b
Examples:
  automesh serve                               on http://127.0.0.1:8700
  automesh serve --results /shared/results --searches 0     only show
  automesh serve --storage postgresql://me@db/mesh --hostname mesh.org
  automesh serve --agents-only --keep 90d
  automesh serve --listen 10.0.0.1:8700 --certificate mesh.pem --key mesh.key

\b
Exit codes:
  0 ended by Ctrl-C or SIGTERM   2 bad input, or the address is taken
"""
_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at, with or without a port.")
    ] = "127.0.0.1:8700",
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder with studies of searches on this machine.")
    ] = Path("results"),
    storage: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Storage of the searches, if they had one; its password in the environment, as "
            "for `search`.",
        ),
    ] = "",
    home: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the service: tokens, submissions, audit."),
    ] = Path("automesh-service"),
    hostname: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another host name of the service, as behind a proxy; may be given again.",
            show_default=False,
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a proxy on another machine, through which many users connect; may be "
            "given again.",
            show_default=False,
        ),
    ] = None,
    certificate: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="PEM file of a certificate, for TLS.", show_default=False
        ),
    ] = "",
    key: Annotated[
        str, typer.Option(metavar="FILE", help="PEM file of its key.", show_default=False)
    ] = "",
    searches: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Submitted searches that run at once; 0: only show studies.",
        ),
    ] = 1,
    agents_only: Annotated[
        bool,
        typer.Option(
            "--agents-only", help="Run no submitted search here: agents that connect run them."
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Remove submissions that ended so long ago, with their studies: 90d; by default "
            "never.",
            show_default=False,
        ),
    ] = None,
) -> None:
    for option, text in (("--storage", storage), ("--listen", listen)):
        read_option(option, check_text, text)
    if agents_only and not searches:
        raise UsageError(
            "--agents-only: with --searches 0 the service takes no submissions for agents either",
            hint="leave out one of the two",
        )
    keep_s = read_option("--keep", parse_duration, keep) if keep is not None else None
    names = [read_option("--hostname", check_text, name) for name in hostname or ()]
    proxies = [read_option("--proxy", check_text, one) for one in proxy or ()]

    def path_of(option: str, text: str) -> Path:
        return read_option(option, user_path, text)

    folders = [path_of("--results", str(results)), path_of("--home", str(home))]
    pem = [
        path_of(option, text) if text else None
        for option, text in (("--certificate", certificate), ("--key", key))
    ]
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the service needs {', '.join(missing)}, which is not installed",
            hint="pip install jax-automesh-service",
        )
    # Imported here, because other commands must not wait for a web server.
    from automesh_service.serve.server import ServeOptions, to_stderr
    from automesh_service.serve.server import serve as start

    options = ServeOptions(
        home=folders[1],
        results=folders[0],
        storage=storage,
        listen=listen,
        names=tuple(names),
        certificate=pem[0],
        key=pem[1],
        searches=searches,
        keep_s=keep_s,
        has_runner=not agents_only,
        proxies=tuple(proxies),
    )
    start(options, to_stderr)
