"""Do searches on two hosts survive that ranks, agents, hosts and the search are killed or stopped?

A tiny step over `dp` and `tp` on two processes of four virtual CPU devices each, one under each of
two agents. Blows fall while it compiles and while it measures: SIGKILL or SIGSTOP to a process of
the gang, to an agent, to the search; where Ray is installed, a node of it dies or an agent of it is
stopped, where SLURM is, a job step. After each is looked how long it took until another process
came, who was left, and whether the search goes on; after each end of a search the study is read
from outside, and at the end of a study a measured rule must be there. With `--raw` every study that
was finished is kept, and the same command goes on. The last line on stdout is one JSON object;
progress goes to stderr.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import optuna
import typer

from benchmarks.kill_fleet.blows import (
    Blow,
    Launch,
    StudyRow,
    blows,
    line_of,
    next_study,
    row_of,
    summary,
    without,
)
from benchmarks.kill_fleet.clusters import cluster_of, missing
from benchmarks.kill_fleet.study import FleetPlace, KilledStudy, say

LAUNCHES: tuple[Launch, ...] = ("local", "ray", "slurm")
KILLS_PER_STUDY = 12
MOST_MISSES = 5
"""Studies in a row in which nobody could be struck."""


def main(
    kills: Annotated[int, typer.Option(min=1, help="How many.")] = 60,
    seed: Annotated[int, typer.Option(help="Of moments and victims.")] = 0,
    launch: Annotated[
        list[str] | None,
        typer.Option(help="What starts the agents: local, ray, slurm; all that is here by itself."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Of each start of a search.")] = "3m",
    raw: Annotated[
        Path | None, typer.Option(help="Keeps each study in this file, as a line of JSON.")
    ] = None,
) -> None:
    """Kills ranks, agents and searches, and counts what was lost, repeated or left behind."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    absent = missing()
    chosen = [one for one in LAUNCHES if (one in launch if launch else one not in absent)]
    if launch and (wrong := [one for one in launch if one not in chosen or one in absent]):
        raise typer.BadParameter(f"{wrong[0]}: {dict(absent).get(wrong[0], 'is no launcher')}")
    rows = read(raw)
    left = without(blows(kills, chosen, seed=seed), rows)
    rows += kill(left, seed=seed + len(rows), budget=budget, raw=raw)
    print(json.dumps(summary(rows, missing=absent)))
    if any(row.faults for row in rows):
        sys.exit(1)


def read(raw: Path | None) -> list[StudyRow]:
    """The studies of earlier runs."""
    if raw is None or not raw.exists():
        return []
    return [row_of(json.loads(line)) for line in raw.read_text(encoding="utf-8").splitlines()]


def kill(left: list[Blow], *, seed: int, budget: str, raw: Path | None) -> list[StudyRow]:
    """Lets all blows fall, in as many studies as it takes."""
    luck, rows, misses = random.Random(seed), list[StudyRow](), 0
    while left and misses < MOST_MISSES:
        chosen = next_study(left, KILLS_PER_STUDY)
        launch = chosen[0].launch
        with (
            tempfile.TemporaryDirectory(prefix="automesh-fleet-") as folder,
            cluster_of(launch) as cluster,
        ):
            where = Path(folder).resolve()
            results = where / "results"
            place = FleetPlace(folder=where, results=results, cluster=cluster, budget=budget)
            study = KilledStudy(place=place, launch=launch, blows=chosen, luck=luck, say=say)
            row = study.run()
        rows.append(row)
        if raw is not None:
            with raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line_of(row)) + "\n")
        misses = 0 if row.kills else misses + 1
        left = without(left, [row])
        say(f"study of {len(row.kills)} kills in {row.seconds:.0f} s, {len(left)} blows left")
    return rows
