"""`automesh check-script`: looks at a script as a search would, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from automesh.cli.options import (
    AllAsJson,
    Baseline,
    Entry,
    Hardware,
    Module,
    Script,
    ScriptArgs,
    Space,
    Split,
    Step,
    Target,
    named,
    print_report,
    read_option,
    reads,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckScriptGiven:
    """The arguments and options of `automesh check-script`."""

    script: Script = None
    script_args: ScriptArgs = None
    module: Module = ""
    entry: Entry = ""
    target: Target = "local"
    hardware: Hardware = ""
    space: Space = "auto"
    step: Step = ""
    split: Split = None
    baseline: Baseline = ""
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Limit for calling build and tracing once.")
    ] = "2m"
    show_all: Annotated[
        bool, typer.Option("--all", help="A line for each array, however many there are.")
    ] = False
    json: AllAsJson = False


@reads(CheckScriptGiven)
def check_script(given: CheckScriptGiven) -> None:
    from automesh import api
    from automesh.units import parse_duration

    read_option("--timeout", parse_duration, given.timeout)
    script, args = named(given.script, given.module, given.entry, given.script_args)
    if script is None:
        raise UsageError("no script is given", hint="`automesh check-script train.py`")
    check = api.check_script(
        script,
        target=given.target,
        hardware=given.hardware,
        space=given.space,
        baseline=given.baseline,
        step=given.step,
        split=given.split or [],
        args=args or [],
        timeout=given.timeout,
        progress=api.progress_on_stderr(),
    )
    print_report(check.to_report(show_all=given.show_all), as_json=given.json)
    if not check.is_ready:
        raise typer.Exit(1)
