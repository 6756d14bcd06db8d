"""`automesh show`: what a study has found so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import StorageOfSearch, Verbose, print_result

HELP = """Show what a study has found so far, without running anything.

\b
Examples:
  automesh show                               the newest under results/
  automesh show results/train-cpu-8-3fa9c1d2
  automesh show --json | jq .best
"""


def show(
    study: Annotated[
        Path | None,
        typer.Argument(
            metavar="STUDY",
            help="Folder of a study; by default the newest under --results.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the studies.")] = Path(
        "results"
    ),
    storage: StorageOfSearch = "",
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Rows to print.")] = 8,
    verbose: Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from automesh import api

    found = api.show(study, results=results, storage=storage)
    print_result(found, as_json=as_json, top=top, verbose=verbose)
