"""Public training scripts, as they are: does a search of them come to a rule, and on which targets?

    python -m benchmarks.public_scripts benchmarks/data/public_scripts.json CHECKOUTS

The manifest names scripts of others by repository, commit and path, with the arguments and the
variables that they are run with, and the stand-ins for data and packages that are not here.
CHECKOUTS holds one folder for each repository, named `OWNER_NAME`. Each script is searched on
virtual CPU devices, and estimated for a TPU slice, two slices and two GPU nodes. The table goes to
stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

TARGETS = ("cpu:8", "tpu-v5p-16", "tpu-v5p-16-2", "gpu-h100-16")
STAND_INS = Path(__file__).parent / "stand_ins"
_STARTED = re.compile(r"the script was started (\d+) times?(?:: (.*))?")
_STEP = re.compile(r"run up to its step `([^`]+)`")
_AGAIN = "run again for each mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script of others.

    Attributes:
      repository: `owner/name` on GitHub.
      commit: whose version was run.
      path: of the script in the repository.
      arguments: its own `sys.argv[1:]`.
      variables: of its environment.
      stand_ins: folders of `benchmarks/stand_ins` that come first in its import path.
      import_paths: folders of the repository that come next.
      prepare: a program of `benchmarks/stand_ins` that writes data once, and its arguments;
        `{root}` in them is the folder of the repository.
      options: more options of `automesh search`.
      packages: that it imports and automesh does not bring along, as `pip install` names them.
    """

    repository: str
    commit: str
    path: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str]
    stand_ins: tuple[str, ...] = ()
    import_paths: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one search of one script said.

    Attributes:
      target: of the search.
      step: the function that it took for the training step; empty if it found none.
      plans: how many meshes are legal; 0 if the search failed.
      best: the mesh of the rule, or what was best until the search ended; empty if it failed.
      has_rule: whether a rule was written.
      own: the script's own mesh; empty if it is not one of the target's.
      starts: how often the script was started; 0 if that was not said.
      started_for: what each start was for.
      is_carried: whether the stored step was carried to the other meshes.
      why_not: why the script was run again for each mesh.
      error: the sentence with which a search without a result ended.
      took_s: wall time of the search, seconds.
    """

    target: str
    step: str = ""
    plans: int = 0
    best: str = ""
    has_rule: bool = False
    own: str = ""
    starts: int = 0
    started_for: str = ""
    is_carried: bool = False
    why_not: str = ""
    error: str = ""
    took_s: float = 0.0


def folder_of(script: Script, checkouts: Path) -> Path:
    """The folder that holds the repository of a script."""
    return checkouts / script.repository.replace("/", "_")


def preparing(script: Script, checkouts: Path) -> list[str]:
    """The command that writes the data of a script; empty if it needs none."""
    if not script.prepare:
        return []
    program, *arguments = script.prepare
    root = str(folder_of(script, checkouts))
    return [
        *(sys.executable, str(STAND_INS / program)),
        *(argument.replace("{root}", root) for argument in arguments),
    ]


def read_manifest(path: Path) -> list[Script]:
    """The scripts of a manifest.

    Raises:
      typer.BadParameter: it is not a manifest.
    """
    try:
        listed = json.loads(path.read_text())["scripts"]
        return [
            Script(
                repository=one["repository"],
                commit=one["commit"],
                path=one["path"],
                variables=one.get("variables", {}),
                **{
                    field: tuple(one.get(field, ()))
                    for field in (
                        *("arguments", "stand_ins", "import_paths"),
                        *("prepare", "options", "packages"),
                    )
                },
            )
            for one in listed
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(
            f"{path} is not a manifest: expected `scripts`, each with `repository`, `commit` and "
            f"`path` ({error})"
        ) from error


def outcome_of(target: str, said: str, words: str, took_s: float) -> Outcome:
    """Reads what `automesh search --json --verbose` said.

    Args:
      target: of the search.
      said: its stdout: one JSON object, or nothing if it failed.
      words: its stderr.
      took_s: seconds that it took.
    """
    try:
        report: dict[str, Any] = json.loads(said)
    except ValueError:
        return Outcome(target=target, error=_sentence(words), took_s=took_s)
    if "candidates" not in report:
        error = report.get("error", report)
        message = error.get("message", error) if isinstance(error, dict) else error
        return Outcome(target=target, error=str(message), took_s=took_s)
    notes = [*report["notices"], *report["details"]]
    text = "\n".join(notes)
    started, step = _STARTED.search(text), _STEP.search(text)
    again = [note for note in notes if _AGAIN in note]
    best = report["best"] or {}
    return Outcome(
        target=target,
        step=step[1] if step else "",
        plans=report["funnel"]["legal"],
        best=best.get("plan") or "",
        has_rule=bool(report.get("rules_path")),
        own=report["baseline"] or "",
        starts=int(started[1]) if started else 0,
        started_for=(started[2] or "") if started else "",
        is_carried=not again,
        why_not=again[0] if again else "",
        error="" if best else str(report["stop_reason"]),
        took_s=took_s,
    )


def _sentence(words: str) -> str:
    """The error that ends what a search said; what was in progress before is left out."""
    lines = [line for line in words.splitlines() if line.strip() and not line.startswith("... ")]
    first = next((n for n, line in enumerate(lines) if line.startswith("error")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[max(0, first) :])


def search(script: Script, checkouts: Path, target: str, budget: str, results: Path) -> Outcome:
    """Searches one script on one target, in its own folder.

    Args:
      script: to search.
      checkouts: folder of all repositories.
      target: by name.
      budget: of a search on `cpu:N`; other targets are estimated.
      results: folder for studies and rules.
    """
    root = folder_of(script, checkouts)
    path = root / script.path
    if not path.exists():
        missing = f"{path} does not exist: check out {script.repository} at {script.commit}"
        return Outcome(target=target, error=missing)
    paths = [str(STAND_INS / one) for one in script.stand_ins]
    paths += [str(root / one) for one in script.import_paths]
    kind = ("--budget", budget) if target.startswith("cpu") else ("--dry-run",)
    command = [
        *(sys.executable, "-m", "automesh", "search", path.name, "--target", target, *kind),
        *("--json", "--verbose", "--new", "--results", str(results)),
        *("--rules", str(results / "mesh_rules.toml"), *script.options, "--", *script.arguments),
    ]
    inherited = [p for p in (os.environ.get("PYTHONPATH", ""),) if p]
    environment = {
        **os.environ,
        "MPLBACKEND": "agg",
        **script.variables,
        "PYTHONPATH": os.pathsep.join([*paths, *inherited]),
    }
    began_s = time.monotonic()
    ended = subprocess.run(
        command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False
    )
    return outcome_of(target, ended.stdout, ended.stderr, time.monotonic() - began_s)


def cell(outcome: Outcome) -> str:
    """What the table says of one search."""
    if outcome.error:
        return outcome.error
    kept = "" if outcome.best != outcome.own else ", its own"
    how = "carried" if outcome.is_carried else "run again"
    ruled = "" if outcome.has_rule or not outcome.target.startswith("cpu") else "; no rule"
    return f"{outcome.best}{kept}, of {outcome.plans}; {how}, {outcome.starts} starts{ruled}"


def summary(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Counts of scripts, for each target: with a result, among several meshes, carried."""
    targets = list(dict.fromkeys(one.target for found in outcomes.values() for one in found))
    by_target = {
        target: [one for found in outcomes.values() for one in found if one.target == target]
        for target in targets
    }
    return {
        "scripts": len(outcomes),
        "repositories": len({"/".join(name.split("/")[:2]) for name in outcomes}),
        "targets": {
            target: {
                "searched": len(found),
                "with_a_result": sum(not one.error for one in found),
                "with_a_rule": sum(one.has_rule for one in found),
                "among_several": sum(not one.error and one.plans > 1 for one in found),
                "carried": sum(not one.error and one.is_carried for one in found),
                "three_starts_at_most": sum(0 < one.starts <= 3 for one in found),
            }
            for target, found in by_target.items()
        },
    }


def main(
    manifest: Annotated[Path, typer.Argument(help="JSON file that names the scripts.")],
    checkouts: Annotated[Path, typer.Argument(help="Folder with a checkout of each repository.")],
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="Only this target; may be repeated.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only scripts whose name holds this text.")] = "",
    budget: Annotated[str, typer.Option(help="Of each search on cpu:8.")] = "2m",
    results: Annotated[Path, typer.Option(help="Folder for studies and rules.")] = Path(
        "results/public_scripts"
    ),
) -> None:
    """Searches public training scripts as they are, and says what came of each."""
    scripts = [one for one in read_manifest(manifest) if only in one.name]
    results.mkdir(parents=True, exist_ok=True)
    if needed := sorted({package for script in scripts for package in script.packages}):
        typer.echo(f"the scripts need: pip install {' '.join(needed)}", err=True)
    outcomes: dict[str, list[Outcome]] = {}
    for script in scripts:
        if command := preparing(script, checkouts.resolve()):
            subprocess.run(command, check=True)
        for target in targets or TARGETS:
            found = search(script, checkouts.resolve(), target, budget, results.resolve())
            outcomes.setdefault(script.name, []).append(found)
            line = f"{script.name} | {target} | `{found.step}` | {cell(found)}"
            typer.echo(f"{line} | {found.took_s:.0f} s", err=True)
    rows = {name: [asdict(one) for one in found] for name, found in outcomes.items()}
    typer.echo(json.dumps({**summary(outcomes), "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
