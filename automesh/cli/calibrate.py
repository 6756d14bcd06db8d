"""`automesh calibrate`: measures the devices."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import json_text, read_option
from automesh.errors import Interrupted

HELP = """Measure the devices, so that searches estimate with their real speeds instead
of a data sheet's.

All devices work at once on small programs: multiplications of many shapes, copies, kernels
that do next to nothing, and each collective over groups of every size that a mesh axis can
have. The profile goes to a folder of yours ($AUTOMESH_PROFILES, if set). Later searches on
devices of the same kind pick it up; for virtual CPU devices also their number and this
machine must be the same. Measuring again merges: newer points replace older ones.

The table says how far each law is off at points that it was not fitted to. Let the machine
do nothing else meanwhile.

\b
Examples:
  automesh calibrate                          the attached devices
  automesh calibrate --target cpu:8 --budget 2m
  automesh calibrate --out our_cluster.json
"""


def calibrate(
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Devices to measure: local or cpu:N.")
    ] = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the profile goes; by default where searches look for it.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="For measuring: 30s, 5m; the rest is left out.")
    ] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    from automesh import api
    from automesh.units import parse_duration

    read_option("--budget", parse_duration, budget)
    result = api.calibrate(target, out=out, budget=budget, progress=api.progress_on_stderr())
    if as_json:
        sys.stdout.write(json_text(result))
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(result.table(width=width, colour=api.is_colourful()))
    if result.interrupted:
        raise Interrupted(
            "interrupted; what is measured is kept",
            hint="the same command measures everything again, newer points replace older ones",
        )
