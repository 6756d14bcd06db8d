"""`automesh report`: a study as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import StorageOfSearch

HELP = """Write a study as one HTML page: which mesh, why, how sure.

The page is one file that loads nothing from anywhere: send it, keep it, print it. It has the
verdict and the rule to copy, all plans in a table that can be sorted and filtered, step time
against memory, where the time goes, two plans side by side, collectives by axis and source line,
schedules in time, where the mesh lies on the devices, the rounds of the race, and how far
predictions were off. Nothing is run.

\b
Examples:
  automesh report                             the newest under results/
  automesh report results/train-cpu-8-3fa9c1d2
  automesh report results/train-cpu-8-3fa9c1d2 --out report.html
"""


def report(
    study: Annotated[
        Path | None,
        typer.Argument(
            metavar="STUDY",
            help="Folder of a study; by default the newest under --results.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="By default report.html in the study's folder.", show_default=False
        ),
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the studies.")] = Path(
        "results"
    ),
    storage: StorageOfSearch = "",
) -> None:
    from automesh import api

    path = api.write_report(study, out, results=results, storage=storage)
    sys.stdout.write(f"{path}\n")
