"""`automesh submit`: a search on another machine, through a service."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from automesh.cli.options import ScriptArgs, read_option, reads
from automesh.errors import NoFeasibleMesh, UsageError
from automesh.jsonio import dumps
from automesh.texts.user_text import check_text, user_path

if TYPE_CHECKING:
    from automesh_service.remote.client import Server
    from automesh_service.remote.submit import EndedSubmission
    from automesh_service.submissions.order import Order

SERVER = "AUTOMESH_SERVER"
HELP = """Submit a search to a service, follow it, and take its rule home.

The folder of SCRIPT is sent (or --folder, if it imports from further up): at most 64 MiB,
without links, hidden folders, results, rules and caches. The search runs on the service's host,
or on the host of an agent (--need lists what that host must have). Its output is shown here, its
table goes to stdout, and its rule is merged into mesh_rules.toml in the script's folder, as
`automesh search` does. Ctrl-C stops following, not the search: the same command follows it again,
or resumes it if it has ended without a rule.

The token for the service comes from AUTOMESH_SERVER_TOKEN, or the file of mode 0600 that
AUTOMESH_SERVER_TOKEN_FILE names; the token of your own service on this machine is found by itself.

\b
Examples:
  automesh submit train.py --server https://mesh.example.com
  automesh submit train.py --target cpu:8 --budget 3m
  automesh submit jobs/train.py --folder . --detach -- --size small
  automesh submit train.py --need gpu-h100-8

\b
Exit codes:
  0 found   1 nothing may become a rule   2 refused, or nobody answers
  130 Ctrl-C
"""

SERVER_OPTION = """Address of the service; by default AUTOMESH_SERVER, else a service on this
machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitGiven:
    """The options of `automesh submit`; `automesh search --server` has some of them."""

    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False)
    ]
    script_args: ScriptArgs = None
    server: Annotated[str, typer.Option(metavar="URL", help=SERVER_OPTION, show_default=False)] = ""
    folder: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Folder to send; by default the script's own.",
            show_default=False,
        ),
    ] = ""
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="As for `search`; local: devices of the host that runs it.",
            show_default=False,
        ),
    ] = None
    space: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="A search space, or a TOML file in the folder.", show_default=False
        ),
    ] = ""
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for each run: 90s, 10m, 1.5h.")
    ] = "10m"
    need: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="Label that its host must have, by its agent: gpu-h100-8; may be given again.",
            show_default=False,
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="As for `search`.", show_default=False),
    ] = None
    baseline: Annotated[
        str, typer.Option(metavar="MESH", help="As for `search`.", show_default=False)
    ] = ""
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the rule; by default mesh_rules.toml in the script's folder.",
            show_default=False,
        ),
    ] = None
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Do not wait for the end; print the submission number."),
    ] = False
    new: Annotated[
        bool, typer.Option("--new", help="Make another submission of the same search.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets, each of which gets a rule."""
        return tuple(self.target or ["local"])


@reads(SubmitGiven)
def submit(given: SubmitGiven) -> None:
    submit_and_follow(given)


def submit_and_follow(asked: SubmitGiven) -> None:
    """Runs `automesh submit`, and `automesh search --server`."""
    from automesh_service.remote.client import open_server
    from automesh_service.remote.submit import follow, submit

    order, folder = _order(asked)
    rules = asked.rules if asked.rules is not None else _beside(asked.script)
    rules = read_option("--rules", user_path, str(rules))
    address = asked.server or os.environ.get(SERVER, "") or "http://127.0.0.1:8700"
    service, path = read_option("--server", lambda url: open_server(url, _say), address)
    if path:
        raise UsageError(f"--server: `{address}` has a path behind the address of the service")
    taken = submit(service, order, folder, rules=rules, is_new=asked.new)
    known = ", which was there already" if taken.is_known else ""
    _say(f"submission {taken.number}{known}: {service.url}/submissions/{taken.number}")
    if asked.detach:
        sys.stdout.write(f"{taken.number}\n")
        return
    _finish(service, follow(service, taken.number, _say), asked, rules)


def _finish(service: Server, ended: EndedSubmission, asked: SubmitGiven, rules: Path) -> None:
    """Prints the results of a submission, and merges its rules.

    Raises:
      NoFeasibleMesh: no plan may become a rule.
      UsageError: the search was refused or cancelled.
    """
    from automesh_service.remote.submit import result_json, tables, take_rules

    studies = ended.studies
    if asked.json:
        found = result_json(service, studies)
        sys.stdout.write(dumps(found[0] if len(found) == 1 else found, indent=1) + "\n")
    else:
        columns = shutil.get_terminal_size().columns
        width = min(max(columns, 40), 400)
        sys.stdout.write(tables(service, studies, width=width, top=asked.top or 8))
    match ended.state:
        case "found":
            merged = take_rules(service, studies, rules, targets=asked.targets)
            _say(f"merged the rule for {', '.join(merged)} into {rules}")
        case "nothing":
            raise NoFeasibleMesh(ended.said)
        case state:
            raise UsageError(f"the submission ended as {state}: {ended.said}")


def _order(asked: SubmitGiven) -> tuple[Order, Path]:
    from automesh.units import parse_duration
    from automesh_service.remote.submit import order_for
    from automesh_service.submissions.order import Order, check_label

    for option, texts in (
        ("--target", asked.targets),
        ("--baseline", (asked.baseline,)),
        ("--space", (asked.space,)),
        ("-- ARGS", asked.script_args or ()),
    ):
        for text in texts:
            read_option(option, check_text, text)
    for text in asked.need or ():
        read_option("--need", check_label, text)
    read_option("--budget", parse_duration, asked.budget)
    if asked.folder:
        read_option("--folder", user_path, asked.folder)
    order = Order(
        entry="",
        args=tuple(asked.script_args or ()),
        targets=asked.targets,
        budget=asked.budget,
        baseline=asked.baseline,
        top=asked.top or 0,
        needs=tuple(asked.need or ()),
    )
    return order_for(asked.script, order, folder=asked.folder, space=asked.space)


def _beside(script: str) -> Path:
    location, colon, _ = script.rpartition(":")
    return Path(location if colon else script).parent / "mesh_rules.toml"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
