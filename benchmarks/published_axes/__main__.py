"""Classes that are told from the flow of a step, beside the logical axis names of the authors.

    python -m benchmarks.published_axes CHECKOUTS

CHECKOUTS holds one folder for each repository, named `OWNER_NAME`. Each model is made small, a
training step of it is traced, and for every array of the parameters the authors' names of its
dimensions are compared with the classes: two dimensions have one name if and only if they have one
class. What differs is listed; the last line on stdout is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.published_axes.compare import Model, compare
from benchmarks.published_axes.flax_models import lm1b, t5
from benchmarks.published_axes.llm_examples import EXAMPLES, llm_example

MODELS: Mapping[str, Callable[[Path], Model]] = {
    "google/flax examples/lm1b": lm1b,
    "google-research/t5x examples/t5": lambda checkouts: t5(checkouts, "t5"),
    "google-research/t5x examples/scalable_t5": lambda checkouts: t5(checkouts, "scalable_t5"),
    **{
        f"jax-ml/jax-llm-examples {folder}": lambda checkouts, folder=folder: llm_example(
            checkouts, folder
        )
        for folder in EXAMPLES
    },
}


def main(
    checkouts: Annotated[Path, typer.Argument(help="Folder with a checkout of each repository.")],
) -> None:
    """Compares classes with the authors' logical axis names."""
    rows: list[dict[str, Any]] = []
    for name, make in MODELS.items():
        repository = name.split()[0].replace("/", "_")
        if not (checkouts / repository).is_dir():
            typer.echo(f"{name}: left out, as {checkouts / repository} is not here", err=True)
            continue
        found = compare(name, make(checkouts))
        same = ", ".join(f"{theirs}={ours}" for theirs, ours in found.one_to_one)
        typer.echo(f"{name}: {found.arrays} arrays; the same: {same}", err=True)
        for one, many in found.split.items():
            typer.echo(f"  `{one}` has several classes: {', '.join(many)}", err=True)
        for one, many in found.merged.items():
            typer.echo(f"  class `{one}` has several names: {', '.join(many)}", err=True)
        rows.append(
            {
                "model": name,
                "arrays": found.arrays,
                "one_to_one": dict(found.one_to_one),
                "split": dict(found.split),
                "merged": dict(found.merged),
            }
        )
    typer.echo(json.dumps({"models": rows}))


if __name__ == "__main__":
    typer.run(main)
