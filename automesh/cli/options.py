"""What several commands share: how an option is read, and how a result is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.texts.storage_url import PASSWORD, has_secret

if TYPE_CHECKING:
    from automesh.answers import Result, Results
    from automesh.report.blocks.nouns import Report

_T = TypeVar("_T")

Hardware = Annotated[str, typer.Option(metavar="FILE", help="TOML file with clusters of your own.")]
ScriptArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own sys.argv, after --."),
]


Module = Annotated[
    str,
    typer.Option(
        "--module",
        "-m",
        metavar="NAME",
        help="Instead of SCRIPT: a module that is run as by `python -m`.",
        show_default=False,
    ),
]
Entry = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Instead of SCRIPT: a console script of an installed package.",
        show_default=False,
    ),
]


def named(
    script: str | None, module: str, entry: str, args: list[str] | None
) -> tuple[str | None, list[str] | None]:
    """What is to be run, in the words of `automesh.search`, and its own arguments.

    Raises:
      UsageError: it was named twice.
    """
    if not module and not entry:
        return script, args
    # Behind `--` stand arguments alone, of which the first looks like a script.
    if (module and entry) or (script is not None and "--" not in sys.argv):
        raise UsageError(
            "it was said twice what to run",
            hint="name a SCRIPT, or --module, or --entry; the program's own arguments follow --",
        )
    own = [*([] if script is None else [script]), *(args or [])]
    return (f"-m {module}" if module else f"--entry {entry}"), own


def with_notice(storage: str) -> str:
    """A storage as it was given; says so on stderr if everybody on this machine can read its
    password."""
    if has_secret(storage):
        sys.stderr.write(
            "note: other users of this machine can read the password in --storage, for example "
            f"with `ps`: leave it out and set {PASSWORD} (see `automesh search --help`)\n"
        )
    return storage


StorageOfSearch = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=with_notice,
        help="The --storage of the search, if it had one; the password as there.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Say how the estimates were made, and how often a script without `build` was "
        "started, too.",
    ),
]


# Of commands that may use several hosts.

_HOSTS = """Hosts, each with an agent; by default one for each process of the target."""
_PROCESSES = """Processes that each host has, which share its GPUs evenly; by default 1, and
of cpu:N*P what --hosts leaves."""
_LISTEN = """Address of this host that agents dial, with or without a port: 10.0.0.1:8600; for
slurm and ray by default what its name means."""
_WAIT = """How long to wait for the agents; by default 5m, for slurm and ray 1d of queue."""
_CERTIFICATE = """PEM file: encrypts what search and agents say to each other, who then
need --ca; docs/clusters.md shows how it is made."""
_CA = """PEM file, on all hosts, by which agents check --certificate that are started for you
(--launch, srun): of who has signed it, or that certificate itself."""
Hosts = Annotated[int, typer.Option(metavar="N", min=0, help=_HOSTS, show_default=False)]
ProcessesPerHost = Annotated[
    int, typer.Option(metavar="N", min=0, help=_PROCESSES, show_default=False)
]
Listen = Annotated[str, typer.Option(metavar="ADDRESS", help=_LISTEN, show_default=False)]
Wait = Annotated[str, typer.Option(metavar="TIME", help=_WAIT, show_default=False)]
Certificate = Annotated[str, typer.Option(metavar="FILE", help=_CERTIFICATE, show_default=False)]
Key = Annotated[str, typer.Option(metavar="FILE", help="PEM file with the key to --certificate.")]
Ca = Annotated[str, typer.Option(metavar="FILE", help=_CA, show_default=False)]


def read_option(option: str, read: Callable[[str], _T], text: str) -> _T:
    """What an option says.

    Raises:
      UsageError: as `read`, with the name of the option in front.
    """
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def spelled(option: str) -> str:
    """How a user writes what Python calls so: `--step-time` for `step_time`."""
    return "-- ARGS" if option == "args" else f"--{option.replace('_', '-')}"


def print_report(report: Report, *, as_json: bool) -> None:
    """Prints what a command has to tell on stdout, for people or as JSON."""
    from automesh.report.blocks.json import to_json
    from automesh.report.blocks.terminal import told

    sys.stdout.write(dumps(to_json(report), indent=1) + "\n" if as_json else told(report))


def print_result(result: Result | Results, *, as_json: bool, top: int, verbose: bool) -> None:
    """Prints a result on stdout, as a table or as JSON."""
    if as_json:
        print_report(result.to_report(), as_json=True)
    else:
        sys.stdout.write(result.table(top=top, verbose=verbose) + "\n")
