"""`automesh presets`: rules for public models that come with automesh."""

from __future__ import annotations

from typing import Annotated

import typer

from automesh.cli.options import print_report

HELP = """List the rules for public models that come with automesh.

They were found by `automesh search` for devices that were not there: every legal mesh was
estimated, and where the target's compiler was at hand, the best were compiled. Each rule is shown
with its evidence and the compiler's version: nothing here was measured. The batch and the length
that it is for are the arguments that one preset is shown with.

PATTERN is a name, or a part of names: maxtext/qwen3-1.7b, llama, 'maxtext/*8x*'.

\b
In the training script:
  config = automesh.load("preset:maxtext/qwen3-1.7b").select("tpu-v5p-64")

\b
Examples:
  automesh presets
  automesh presets maxtext/qwen3-1.7b
  automesh presets --json | jq .presets[].name
"""


def presets(
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="A preset, or a part of names.", show_default=False),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all rules as JSON.")] = False,
) -> None:
    from automesh import api

    found = api.presets(pattern)
    print_report(found.to_report(), as_json=as_json)
