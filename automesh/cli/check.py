"""`automesh check`: are the rules of a file still true of the script?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import (
    AllAsJson,
    Hardware,
    ScriptArgs,
    Step,
    print_report,
    read_option,
    reads,
)
from automesh.errors import UsageError

HELP = """Compile today's step of SCRIPT for every rule of its mesh_rules.toml, and compare it with
the evidence in the rule: memory, FLOPs, collectives by kind and mesh axis, predicted time.

Nothing is run, and none of the devices is needed: it is made for continuous integration. A rule
has regressed if its step needs more memory, sends more, takes longer, or does other work than
when the rule was found, each beyond a bound; or if it does not compile any more. --against
compares two versions of the script in git, and needs no evidence.

\b
Examples:
  automesh check train.py
  automesh check train.py --rules rules.toml --select cpu-8 -- --size 8b
  automesh check train.py --against origin/main --markdown table.md
  automesh check train.py --update            the figures of today are right

\b
Exit codes:
  0 all rules hold   1 a rule has regressed   2 something could not be checked
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckGiven:
    """The arguments and options of `automesh check`."""

    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False),
    ]
    script_args: ScriptArgs = None
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The rules; by default mesh_rules.toml beside the script.",
            show_default=False,
        ),
    ] = None
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="Check its rule alone. May be given again."),
    ] = None
    against: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="Compare with the script as it is in this commit, tag or branch.",
            show_default=False,
        ),
    ] = ""
    hardware: Hardware = ""
    step: Step = ""
    memory: Annotated[str, typer.Option(metavar="P%", help="Bound of memory.")] = "5%"
    flops: Annotated[str, typer.Option(metavar="P%", help="Bound of FLOPs.")] = "1%"
    collectives: Annotated[str, typer.Option(metavar="P%", help="Bound of bytes sent.")] = "2%"
    time: Annotated[str, typer.Option(metavar="P%", help="Bound of the predicted time.")] = "10%"
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Limit for one compile.")] = "10m"
    update: Annotated[
        bool, typer.Option("--update", help="Write the figures of today into the rules.")
    ] = False
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write JUnit XML, too.", show_default=False),
    ] = None
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a table for a pull request, too.", show_default=False
        ),
    ] = None
    json: AllAsJson = False


@reads(CheckGiven)
def check(given: CheckGiven) -> None:
    from automesh import api
    from automesh.report.check.facts import Bounds
    from automesh.report.check.texts import as_junit, as_markdown
    from automesh.report.files.beside import place_of, write_beside
    from automesh.tuner.check.rules import FiguresNotWritten

    bounds = Bounds(
        memory=read_option("--memory", parse_share, given.memory),
        flops=read_option("--flops", parse_share, given.flops),
        collectives=read_option("--collectives", parse_share, given.collectives),
        time=read_option("--time", parse_share, given.time),
    )
    written = [
        (read_option(option, place_of, str(path)), text)
        for option, path, text in (
            ("--junit", given.junit, as_junit),
            ("--markdown", given.markdown, as_markdown),
        )
        if path is not None
    ]
    unwritten: list[FiguresNotWritten] = []
    try:
        checked = api.check(
            given.script,
            rules=given.rules,
            select=given.select or [],
            against=given.against,
            args=given.script_args or [],
            hardware=given.hardware,
            step=given.step,
            timeout=given.timeout,
            bounds=bounds,
            update=given.update,
            progress=api.progress_on_stderr(),
        )
    except FiguresNotWritten as error:
        checked = error.checked
        unwritten.append(error)
    # Printed first: a disk that has become full since then takes only the files.
    print_report(checked.to_report(), as_json=given.json)
    write_beside((path, text(checked)) for path, text in written)
    if unwritten:
        raise unwritten[0]
    if checked.exit_code:
        raise typer.Exit(checked.exit_code)


def parse_share(text: str) -> float:
    """Reads a share in per cent.

    Raises:
      UsageError: it is none, or below zero.

    >>> parse_share("5%"), parse_share("0.5 %")
    (0.05, 0.005)
    """
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,6})?) ?%", text.strip())
    if not match:
        raise UsageError(f"`{text}` is no share", hint="write for example 5%")
    return float(match[1]) / 100
