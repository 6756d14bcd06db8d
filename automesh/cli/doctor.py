"""`automesh doctor`: what is installed on this machine, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer

from automesh.cli.options import print_report
from automesh.errors import UsageError

HELP = """Check this machine: versions, devices, known-bad combinations, and what to
install for which target.

What is compiled for devices that are not here is kept, so that no search compiles it again:
in $AUTOMESH_CACHE, if set, and no more than $AUTOMESH_CACHE_LIMIT, else 4 GiB, of which what
was used least recently goes first. --cache shows it.

\b
Examples:
  automesh doctor
  automesh doctor --target cpu:8
  automesh doctor --cache
  automesh doctor --cache --clear
"""


def doctor(
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Devices to look at: local or cpu:N.")
    ] = "local",
    cache: Annotated[
        bool, typer.Option("--cache", help="Show the compiled programs that are kept instead.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="With --cache: remove them all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    from automesh import diagnosis

    if clear and not cache:
        raise UsageError(
            "--clear removes the compiled programs that --cache shows",
            hint="write `automesh doctor --cache --clear`",
        )
    if cache:
        print_report(diagnosis.examine_store(clear=clear), as_json=as_json)
        return
    findings = diagnosis.examine(target)
    print_report(diagnosis.report_of(findings), as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
