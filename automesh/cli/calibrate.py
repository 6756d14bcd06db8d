"""`automesh calibrate`: measures the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from automesh.cli.options import print_report, spelled, takes
from automesh.errors import Interrupted
from automesh.options.table import HOSTS

if TYPE_CHECKING:
    from automesh.launch.cluster import ClusterOptions

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

Over several hosts, as a search (docs/clusters.md), collectives that cross DCN are measured, too:

\b
  automesh calibrate --target 'cpu:4*2'       here, with two agents
  automesh calibrate --launch slurm --hosts 4
  srun automesh calibrate                     every process takes its part
"""

_LAUNCH = """What starts the agents on several hosts: slurm; ray; local, all of them on this host,
to try it. Without it, and with --listen, start `automesh agent` on each host."""
_TARGET = "Devices to measure: local, cpu:N, or cpu:N*P in P processes."


_HOSTS = tuple(replace(one, help=_LAUNCH) if one.name == "launch" else one for one in HOSTS)


@takes(_HOSTS)
def calibrate(
    target: Annotated[str, typer.Option(metavar="NAME", help=_TARGET)] = "local",
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
    **hosts: Unpack[ClusterOptions],
) -> None:
    from automesh import api
    from automesh.tuner.calibration import read_calibration

    request = api.join_processes(
        read_calibration(target, out=out, budget=budget, hosts=hosts, spelled=spelled)
    )
    if request is None:
        return
    result = api.run_calibration(request, api.progress_on_stderr())
    print_report(result.to_report(), as_json=as_json)
    if result.interrupted:
        raise Interrupted(
            "interrupted; what is measured is kept",
            hint="the same command measures everything again, newer points replace older ones",
        )
