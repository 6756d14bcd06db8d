"""`automesh explain`: where the time of a mesh goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automesh.cli.options import StorageOfSearch, print_report

HELP = """Explain where the time of a mesh goes, or why one mesh beats another, from
estimates; nothing is compiled or run.

STUDY is the folder of a study, as `search` prints it, or a script that no search has seen.
MESH may be followed by knobs and logical axes: "dp:8 remat=full mlp:tp".

Printed are seconds by cause, the ten most expensive collectives with their source lines, the
memory peak, what could not be counted, and the reason in a sentence. Every figure says whether
it is estimated, compiled or measured. Of devices that are not here, a study has replays of the
compiled schedules as well: they are shown next to the estimates, and --trace draws one.

\b
Examples:
  automesh explain results/train-cpu-8-3fa9c1d2 dp:2,tp:4
  automesh explain results/train-cpu-8-3fa9c1d2 dp:8 --against fsdp:8
  automesh explain train.py fsdp:8 --target cpu:8
"""

TRACE_OPTION = """Write the replay of MESH as a Chrome trace, for ui.perfetto.dev; for a study of
devices that are not here."""


def explain(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="Folder of a study, or a script.", show_default=False),
    ],
    mesh: Annotated[
        str,
        typer.Argument(metavar="MESH", help="dp:2,tp:4, or 'dp:8 remat=full'.", show_default=False),
    ],
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="For a script: its own sys.argv, after --."),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="MESH", help="Another mesh, to say why one of the two wins.")
    ] = "",
    target: Annotated[
        str, typer.Option(metavar="NAME", help="For a script: devices, as in search; else local.")
    ] = "",
    hardware: Annotated[
        str, typer.Option(metavar="FILE", help="For a script: clusters of your own, in TOML.")
    ] = "",
    space: Annotated[
        str, typer.Option(metavar="NAME", help="For a script: search space; else auto.")
    ] = "",
    storage: StorageOfSearch = "",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=TRACE_OPTION, show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    from automesh import api

    if trace is not None:
        api.write_trace(study, mesh, trace, storage=storage)
    with api.progress_on_stderr() as progress:
        account = api.explain(
            study,
            mesh,
            against=against,
            target=target,
            hardware=hardware,
            space=space,
            args=script_args or [],
            storage=storage,
            progress=progress,
        )
    print_report(account.to_report(), as_json=as_json)
