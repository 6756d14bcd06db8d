"""`automesh targets`: devices that a search may be aimed at."""

from __future__ import annotations

from typing import Annotated

import typer

from automesh.cli.options import Hardware, print_report

HELP = """List the devices that a search may be aimed at without having them.

Without PATTERN there is a line for each kind. A kind (v5p, h100), a part of names ('tpu-v5*')
or a target (tpu-v5p-128, v5e:4x8, gpu-h100-64) gives names, shapes, speeds, and the sources of
all figures. It is also said what can be compiled for on this machine, and what to install for
the rest.

\b
Clusters of your own become targets with --hardware, here and in search:
  [clusters.lab]
  chip = "h100"                 # on record, or described below
  nodes = 16
  devices_per_node = 8
  network_bytes_per_s = 400e9   # one way, of all network cards of a node
  [clusters.pod]
  chip = "v5p"
  torus = [4, 4, 8]             # chips along each dimension of a slice
  wraps = [true, true, true]    # dimensions whose ends are linked
  slices = 2
  [chips.h100-nvl]              # what differs from the chip that it is like
  like = "h100"
  hbm_bytes = 99.9e9
  hbm_bytes_per_s = 3.9e12
  link_bytes_per_s = 300e9      # one way, over all links to its switch
  flops_per_s = { bf16 = 835e12, fp8 = 1671e12 }

\b
Examples:
  automesh targets
  automesh targets v5p
  automesh targets tpu-v5litepod-256-4
  automesh targets lab --hardware our.toml
  automesh targets --json | jq .targets[].name
"""


def targets(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN",
            help="A target, or a part of names: v5p, h100, 'tpu-v5*'.",
            show_default=False,
        ),
    ] = "",
    hardware: Hardware = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all facts as JSON.")] = False,
) -> None:
    from automesh import api

    found = api.targets(pattern, hardware=hardware)
    print_report(found.to_report(), as_json=as_json)
