"""Are the times and the memory of published TPU runs predicted, and are they put in order?

    python -m benchmarks.recipes [recipes.json]... [--only ID]... [--most 5] [--others] [--summary]

For every published run of MaxText whose flags the installed MaxText takes: a search compiles
MaxText's own step, with its kernels, its mesh and its compiler options, for the devices of the run
(needs MaxText and the `tpu` extra, no devices), replays the schedule, and the time is held against
the one that was measured. Nothing is fitted to these runs. Runs whose flags are not stated exactly
are left out, unless they are asked for (`--inexact`), and never counted with the others. Options
that the installed compiler refuses are left out, and named. Beside them (`tpu_memory.json`) stand
configurations of which MaxText's own history says whether they fit.

A run of versions close to the oldest jax that automesh takes is predicted in an environment with
those versions. Its line in `benchmarks/data/recipes_own_versions.jsonl` (`--kept`) counts instead.

`--others` searches the shipped axes for each record instead, at its model, batch, remat and slice,
and prints the published mesh, as it was predicted, beside the best that is found.

A compile takes minutes, the largest slices hours: records of few devices come first, what finishes
is kept as a line of `benchmarks/data/recipes.jsonl`, and the same command goes on. The last line on
stdout is JSON, without `--others`; progress goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from automesh.errors import AutomeshError, UsageError
from automesh.units import format_seconds
from benchmarks.recipes import summary as told
from benchmarks.recipes.arguments import arguments_of, gpt_sizes
from benchmarks.recipes.installed import Installed, find_installed
from benchmarks.recipes.kept import Kept
from benchmarks.recipes.options import options_of
from benchmarks.recipes.predict import Asked, Prediction, Stopped, asked_of, predicted
from benchmarks.recipes.probe import Probe
from benchmarks.recipes.records import Record, cheapest_first, measured_time, read_published
from benchmarks.support.compiles import say
from benchmarks.support.paths import DATA

RECIPES = DATA / "tpu_recipes.json"
MEMORY = DATA / "tpu_memory.json"
PREDICTED = DATA / "recipes.jsonl"
OWN_VERSIONS = DATA / "recipes_own_versions.jsonl"
OTHERS = DATA / "recipes_others.jsonl"
_TOP = 4  # plans that are compiled in a search of other meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """Records that are to be predicted, and the reasons of the others by id."""

    records: tuple[Record, ...]
    left_out: dict[str, str]


def sort_out(records: Sequence[Record], installed: Installed, *, inexact: bool) -> Sorted:
    """Which records the installed MaxText takes, those first that compile soonest."""
    taken, left_out = list[Record](), dict[str, str]()
    for record in cheapest_first(records):
        arguments = arguments_of(record, installed.keys, installed.models)
        if arguments.reason:
            left_out[record.id] = arguments.reason
        elif not record.is_exact and not inexact:
            left_out[record.id] = f"its flags are {record.flags_basis.partition(':')[0]}"
        else:
            taken.append(record)
    return Sorted(records=tuple(taken), left_out=left_out)


def _all_records(paths: Sequence[Path]) -> tuple[Record, ...]:
    found: dict[str, Record] = {}
    for path in paths:
        one = read_published(path)
        for record in (*one.records, *one.oom_records):
            if found.setdefault(record.id, record) is not record:
                raise UsageError(
                    f"`{path}` has the record `{record.id}`, as a file before it has",
                    hint="name each file once",
                )
    return tuple(found.values())


def main(
    recipes: Annotated[
        list[Path] | None, typer.Argument(help="Files of published runs; default: all of ours.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only records of these ids, comma-separated too.")
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="At most so many compiles; 0: all.")] = 0,
    inexact: Annotated[
        bool, typer.Option("--inexact", help="Also runs whose flags are not stated exactly.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed before.")] = False,
    others: Annotated[
        bool, typer.Option("--others", help="Search other meshes for each record.")
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Compile nothing: figures of what is kept.")
    ] = False,
    limit: Annotated[str, typer.Option(help="Time for one record.")] = "2h",
    folder: Annotated[Path, typer.Option(help="For studies.")] = Path("results/recipes"),
    kept: Annotated[Path | None, typer.Option(help="File of predictions.")] = None,
) -> None:
    """Predicts, and prints record by record."""
    path = kept or (OTHERS if others else PREDICTED)
    try:
        records = _all_records(recipes or [RECIPES, MEMORY])
        lines = Kept.open(path)
        own = {} if kept or others else Kept.open(OWN_VERSIONS).lines
        if not summary:
            installed = find_installed()
            chosen = sort_out(records, installed, inexact=inexact)
            names = {name for one in only or () for name in one.split(",")}
            wanted = [one for one in chosen.records if not names or one.id in names]
            for name in sorted(names - {one.id for one in wanted}):
                say(f"{name} is not predicted: {chosen.left_out.get(name, 'no such record')}")
            run = _Run(
                installed=installed,
                folder=folder.absolute(),
                limit=limit,
                kept=lines,
                probe=Probe(path=folder / "options.json", versions=installed.versions),
            )
            run.all(wanted, most=most, top=_TOP if others else 0, retry=retry)
            if not names:
                print(f"{len(chosen.left_out)} of {len(records)} records are not predicted:")
                print("\n".join(told.left_out(chosen.left_out)))
    except AutomeshError as error:
        raise SystemExit(f"error: {error}") from None
    found = lines.lines | own
    rows = [
        told.Row(
            record=record,
            time=measured_time(record, gpt_sizes(record)),
            prediction=found[record.id],
        )
        for record in cheapest_first(records)
        if record.id in found
    ]
    if others:
        print("\n".join(told.beside(rows, Kept.open(PREDICTED).lines)))
        return
    for row in rows:
        print("\n".join(told.described(row)))
    print(json.dumps(told.summary(rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Predicts records one after the other."""

    installed: Installed
    folder: Path
    limit: str
    kept: Kept
    probe: Probe

    def all(self, records: Sequence[Record], *, most: int, top: int, retry: bool) -> None:
        """Predicts those of which nothing is kept; one that comes to no verdict is passed over."""
        compiles = 0
        for number, record in enumerate(records, start=1):
            asked = self.asked(record)
            found = self.kept.find(asked)
            if found is not None and not (retry and found.found.kind == "failed"):
                if self.kept.lines.get(record.id) != found:
                    self.kept.keep(found)
                continue
            if most and compiles >= most:
                continue
            compiles += 1
            say(f"{number}/{len(records)} {record.id}: {asked.mesh} on {asked.target}")
            try:
                found = predicted(asked, self.folder, limit=self.limit, top=top, is_new=retry)
            except Stopped as stopped:
                say(str(stopped))
                continue
            self.kept.keep(found)
            say(f"{record.id}: {_said(found)}")

    def asked(self, record: Record) -> Asked:
        """What is asked for a record, without the options that are refused."""
        options = options_of(record.xla_flags)
        return asked_of(
            record,
            arguments_of(record, self.installed.keys, self.installed.models),
            options,
            self.probe.refused(record.generation, options.texts),
            self.installed.versions,
        )


def _said(one: Prediction) -> str:
    found = one.found
    if found.kind == "predicted":
        return f"{format_seconds(found.step_s)}, compiled in {found.compile_s:.0f} s"
    return f"{found.kind}: {found.reason}"
