"""`automesh lint`: what the compiler does to a step that nobody asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
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
from automesh.jsonio import dumps

HELP = """Say what the compiler does to the step of SCRIPT that nobody asked for: an array that is
gathered whole, a moment that fsdp was meant to split, a microbatch reshape that sends the batch
around, a donation that is lost. Nothing is compiled or run, and none of the devices is needed.

SCRIPT is named as in search. MESH is dp:2,tp:4, and knobs may follow: "dp:8 remat=full". Without
MESH the script's own mesh is looked at, and all meshes of a script that says none.

Printed are for each finding its line, rule, array and bytes, why the compiler does so, and the
cure; where a cure could be tried in a copy of the step, the change and what it saves, estimated.
A comment at the line silences a rule: `# automesh: allow microbatch-reshape`. docs/lint.md has
an example of every rule.

\b
Examples:
  automesh lint train.py
  automesh lint train.py fsdp:8 --target cpu:8
  automesh lint train.py --all --target tpu-v5p-128 -- --layers 4
  automesh lint train.py --json | jq '.findings[].rule'
  automesh lint train.py --sarif lint.sarif    for checks of pull requests

\b
Exit codes:
  0 nothing found   1 findings   2 bad input
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintGiven:
    """The arguments and options of `automesh lint`."""

    script: Script = None
    mesh: Annotated[
        str | None,
        typer.Argument(metavar="MESH", help="dp:2,tp:4, or 'dp:8 remat=full'.", show_default=False),
    ] = None
    script_args: ScriptArgs = None
    module: Module = ""
    entry: Entry = ""
    every: Annotated[
        bool, typer.Option("--all", help="Look at all meshes, and say each finding once.")
    ] = False
    target: Target = "local"
    hardware: Hardware = ""
    space: Space = "auto"
    step: Step = ""
    split: Split = None
    baseline: Baseline = ""
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Limit for calling build and propagating once.")
    ] = "10m"
    json: AllAsJson = False
    sarif: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write SARIF 2.1.0 as well.", show_default=False),
    ] = None


@reads(LintGiven)
def lint(given: LintGiven) -> None:
    from automesh import api
    from automesh.report.files.beside import place_of, write_beside
    from automesh.units import parse_duration

    read_option("--timeout", parse_duration, given.timeout)
    sarif = None if given.sarif is None else read_option("--sarif", place_of, str(given.sarif))
    script, mesh, args = _named(given)
    found = api.lint(
        script,
        mesh,
        every=given.every,
        target=given.target,
        hardware=given.hardware,
        space=given.space,
        step=given.step,
        split=given.split or [],
        baseline=given.baseline,
        args=args,
        timeout=given.timeout,
        progress=api.progress_on_stderr(),
    )
    # Printed first: a disk that has become full since then takes only the file.
    print_report(found.to_report(), as_json=given.json)
    if sarif is not None:
        write_beside([(sarif, dumps(found.to_sarif(), indent=1) + "\n")])
    if not found.is_clean:
        raise typer.Exit(1)


def _named(given: LintGiven) -> tuple[str, str, list[str]]:
    """Returns the script or function, its mesh, and its own arguments.

    Raises:
      UsageError: no script was named, or two.
    """
    script, mesh, rest = given.script, given.mesh, given.script_args or []
    if "--" in sys.argv and mesh is not None and _is_behind_dashes(mesh, rest):
        mesh, rest = None, [mesh, *rest]
    if given.module or given.entry:
        # There is no SCRIPT: the first word is the mesh.
        script, mesh, rest = None, script, [*([] if mesh is None else [mesh]), *rest]
    script, args = named(script, given.module, given.entry, rest)
    if script is None:
        raise UsageError("no script is given", hint="`automesh lint train.py`")
    return script, mesh or "", args or []


def _is_behind_dashes(mesh: str, rest: list[str]) -> bool:
    """Whether the text that was read as the mesh is the first of the script's own arguments."""
    own = sys.argv[sys.argv.index("--") + 1 :]
    return own == [mesh, *rest]
