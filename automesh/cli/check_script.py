"""`automesh check-script`: looks at a script as a search would, in seconds."""

from __future__ import annotations

from typing import Annotated

import typer

from automesh.cli.options import (
    Entry,
    Hardware,
    Module,
    ScriptArgs,
    named,
    print_report,
    read_option,
)
from automesh.errors import UsageError

HELP = """Look at SCRIPT as a search would, in seconds and without searching.

SCRIPT is train.py, train.py:make_step or package.module:function, or it is named by -m or
--entry, as in search. Its `build` is
called on a few small meshes, twice on the first, and its step is traced in two processes.

Printed are the arrays that the step takes, how they are split, and which are made up; the mesh
axes that it uses; the knobs and what a search tries; what goes from one step into the next; and
then the command that searches, or what to mend first.

\b
Examples:
  automesh check-script train.py
  automesh check-script train.py --target cpu:8 --space dense_lm
  automesh check-script train.py --all -- --layers 4
  automesh check-script train.py --json | jq .problems

\b
Exit codes:
  0 ready to search   1 something to mend   2 bad input
"""


def check_script(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False),
    ] = None,
    script_args: ScriptArgs = None,
    module: Module = "",
    entry: Entry = "",
    target: Annotated[str, typer.Option(metavar="NAME", help="Devices, as in search.")] = "local",
    hardware: Hardware = "",
    space: Annotated[
        str, typer.Option(metavar="NAME", help="Search space, as in search.")
    ] = "auto",
    step: Annotated[
        str, typer.Option(metavar="NAME", help="Of a script without `build`, as in search.")
    ] = "",
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=A,B", help="Of a script without `build`, as in search."),
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="MESH", help="The mesh that the script uses today.")
    ] = "",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Limit for calling build and tracing once.")
    ] = "2m",
    show_all: Annotated[
        bool, typer.Option("--all", help="A line for each array, however many there are.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    from automesh import api
    from automesh.units import parse_duration

    read_option("--timeout", parse_duration, timeout)
    script, script_args = named(script, module, entry, script_args)
    if script is None:
        raise UsageError("no script is given", hint="`automesh check-script train.py`")
    check = api.check_script(
        script,
        target=target,
        hardware=hardware,
        space=space,
        baseline=baseline,
        step=step,
        split=split or [],
        args=script_args or [],
        timeout=timeout,
        progress=api.progress_on_stderr(),
    )
    print_report(check.to_report(show_all=show_all), as_json=as_json)
    if not check.is_ready:
        raise typer.Exit(1)
