"""Changes the code in one place at a time, and counts for how many changes a test fails.

Two steps. `lines` runs the ten-minute run of the tests once under coverage.py, and keeps which test
runs which line. `run` draws mutants from the packages whose faults would make a verdict wrong, and
runs for each the tests that come by its line, until one fails. Needs `pip install cosmic-ray
pytest-cov`. What is judged is kept in `results/mutants`: the same command goes on where it was
stopped. Mutants are named by their lines, so that a change of the code draws others: write tests
for those that lived on the same code, and run `run --again`. The last line of `run` on stdout is
JSON; progress goes to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.mutants import coverage_of_tests
from benchmarks.mutants.places import Mutant, draw
from benchmarks.mutants.trial import Result, judge, judge_beside

PACKAGES = [
    "automesh/cost",
    "automesh/mesh",
    "automesh/space",
    "automesh/tuner/measure",
    "automesh/tuner/choose",
    "automesh/report",
]
_ROOT = Path(__file__).resolve().parents[2]
_KEPT = Path("results/mutants")

app = typer.Typer(help=__doc__, add_completion=False)
Kept = Annotated[Path, typer.Option(help="folder for what is known of the lines and the mutants")]


@app.command()
def lines(kept: Kept = _KEPT) -> None:
    """Runs the tests once under coverage.py, with the test as its context: takes half an hour."""
    sys.exit(coverage_of_tests.run(_ROOT, kept.resolve(), PACKAGES))


@app.command()
def run(
    mutants: Annotated[int, typer.Option(help="how many are drawn")] = 200,
    seed: Annotated[int, typer.Option(help="of the draw")] = 1,
    at_once: Annotated[int, typer.Option(help="mutants that are tried at the same time")] = 2,
    most_s: Annotated[
        float, typer.Option(help="seconds of tests that are asked, beside those of the module")
    ] = 300.0,
    again: Annotated[
        bool, typer.Option(help="ask the tests beside the module about those that lived")
    ] = False,
    kept: Kept = _KEPT,
) -> None:
    """Draws mutants, and runs for each the tests that come by its line."""
    tests = coverage_of_tests.read(_ROOT, kept.resolve())
    drawn = draw(_ROOT, PACKAGES, mutants, seed)
    judged_file = kept / f"judged-{seed}.jsonl"
    judged = _known(judged_file)
    missing = [mutant for mutant in drawn if _name(mutant) not in judged]
    lived = {
        name for name, one in judged.items() if again and one["outcome"] in ("lives", "not run")
    }
    missing += [mutant for mutant in drawn if _name(mutant) in lived]
    with _copies(at_once) as copies, ThreadPoolExecutor(at_once) as pool:

        def one(mutant: Mutant) -> tuple[Mutant, Result]:
            copy = copies.get()
            try:
                if _name(mutant) in lived:
                    return mutant, judge_beside(mutant, tests.seconds, copy)
                return mutant, judge(
                    mutant, tests.of(mutant.file, mutant.line), tests.seconds, copy, most_s
                )
            finally:
                copies.put(copy)

        for done in as_completed([pool.submit(one, mutant) for mutant in missing]):
            mutant, result = done.result()
            judged[_name(mutant)] = dataclasses.asdict(result)
            with judged_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([_name(mutant), dataclasses.asdict(result)]) + "\n")
            print(f"{len(judged)}/{len(drawn)} {result.outcome}: {_name(mutant)}", file=sys.stderr)
    print(json.dumps(summary(drawn, judged, seed)))


def summary(drawn: list[Mutant], judged: dict[str, Any], seed: int) -> dict[str, Any]:
    """Counts in all and by package, and each mutant that no test has caught."""
    outcomes = Counter(judged[_name(mutant)]["outcome"] for mutant in drawn)
    by_package: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for mutant in drawn:
        package = next(p for p in PACKAGES if mutant.file.startswith(p + "/"))
        by_package[package][judged[_name(mutant)]["outcome"]] += 1
    return {
        "seed": seed,
        "mutants": len(drawn),
        "caught": outcomes["caught"],
        "caught_share": round(outcomes["caught"] / len(drawn), 3) if drawn else None,
        "by_package": {package: dict(counts) for package, counts in by_package.items()},
        "not_caught": [
            {
                "where": f"{mutant.file}:{mutant.line}",
                "before": mutant.before,
                "after": mutant.after,
                "outcome": judged[_name(mutant)]["outcome"],
            }
            for mutant in drawn
            if judged[_name(mutant)]["outcome"] != "caught"
        ],
    }


def _name(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.operator}: {mutant.before} -> {mutant.after}"


def _known(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    return dict(json.loads(line) for line in file.read_text("utf-8").splitlines())


@contextmanager
def _copies(count: int) -> Iterator[queue.Queue[Path]]:
    """Copies of what git follows: a mutant never stands in the repository itself."""
    with tempfile.TemporaryDirectory(prefix="automesh-mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(count):
            copy = Path(folder, str(index))
            listed = subprocess.run(
                ["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True, text=True
            )
            for name in filter(None, listed.stdout.split("\0")):
                if (_ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(_ROOT / name, copy / name)
            copies.put(copy)
        yield copies


def main() -> None:
    app()
