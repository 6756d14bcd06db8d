"""Which mesh should MaxText's public models have, and how do published ones compare?

    python -m benchmarks.presets [--model llama3.1-8b]... [--target tpu-v5p-64]...

Makes the presets that come with automesh, in `results/presets`: for each model and each target a
search of MaxText's own step (`automesh search maxtext`), every legal mesh estimated, the best and
the published ones compiled where the target's compiler is installed, the rule with its evidence in
`maxtext/MODEL.toml`, how it was made in `maxtext/MODEL.json`, and an index page with the tables.

It needs MaxText, and for compiles the `tpu` and the `gpu` extra; no devices. Stop it whenever you
like: the same command goes on. What the installed versions of jax, libtpu and MaxText have made is
not made again; with other versions, or other arguments of a model, all of it is. The last line on
stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from automesh.files import write_whole
from automesh.mesh.rules.shipped import find_presets
from benchmarks.presets.index import page
from benchmarks.presets.making import (
    Book,
    Settings,
    compile_best,
    estimate,
    has_compiler,
    is_current,
    missing_of_maxtext,
)
from benchmarks.presets.models import MODELS, TARGETS, Model
from benchmarks.support.compiles import say


def write_index(folder: Path) -> None:
    """Writes the index page of what is kept."""
    write_whole(folder / "README.md", page(find_presets(folder=folder)).encode())


def make(model: Model, target: str, settings: Settings, *, estimates_only: bool) -> None:
    """Makes what is missing of a pair."""
    book = Book.open(model, settings.folder)
    made = book.made.get(target)
    asked = " ".join(model.arguments(target))
    if made is None or not is_current(made, asked):
        say(f"{model.preset} on {target}: estimates")
        estimate(book, target, settings)
        write_index(settings.folder)
    made = book.made[target]
    if not (estimates_only or made.is_final or has_compiler(target)):
        say(f"{model.preset} on {target}: compiles")
        compile_best(book, target, settings)
        write_index(settings.folder)


def _summary(folder: Path) -> dict[str, int]:
    made = [one for preset in find_presets(folder=folder) for one in preset.records.values()]
    kinds = [one.ours.kind if one.ours is not None else "none" for one in made]
    return {"pairs": len(made)} | {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated.")
    ] = None,
    estimates_only: Annotated[
        bool, typer.Option("--estimates-only", help="Compile nothing.")
    ] = False,
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Write the index page of what is kept again.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Plans to compile beside published ones.")] = 3,
    budget: Annotated[str, typer.Option(help="For one search; a pair has a few.")] = "60m",
    timeout: Annotated[str, typer.Option(help="For one compile.")] = "30m",
    workers: Annotated[int, typer.Option(min=0, help="Compiles side by side; 0: all.")] = 0,
    folder: Annotated[Path, typer.Option(help="For what is kept.")] = Path("results/presets"),
    studies: Annotated[Path, typer.Option(help="For searches.")] = Path("results/preset_studies"),
) -> None:
    """Makes the presets that are missing."""
    models = [one for one in MODELS if not model or one.name in model]
    targets = [one for one in TARGETS if not target or one in target]
    if not models or not targets:
        raise SystemExit(
            f"error: models are {', '.join(one.name for one in MODELS)}; "
            f"targets are {', '.join(TARGETS)}"
        )
    settings = Settings(
        folder=folder.absolute(),
        studies=studies.absolute(),
        budget=budget,
        timeout=timeout,
        top=top,
        workers=workers,
    )
    # What this machine lacks says nothing about a pair, and must not replace what is known of it.
    if not index_only and (missing := missing_of_maxtext()):
        raise SystemExit(f"error: {missing}")
    for one in models if not index_only else ():
        for name in targets:
            make(one, name, settings, estimates_only=estimates_only)
    write_index(settings.folder)
    print(json.dumps(_summary(settings.folder)))
