"""How long a dry run keeps its user waiting: until the first ranked row, until the first ten rows
are those of the end, until it says so, until all is estimated.

Each step is searched for two targets, with `--repeat` several times, and with `--against` in turn
with another checkout of automesh: a machine that does other work slows both down alike. With
`--after` each is also searched in a folder where a search for another target has left what it
knows, and the seconds of CPU of both are compared. The last line on stdout is JSON; progress goes
to stderr.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.support.paths import EXAMPLES, ROOT

TARGETS = ("tpu-v5p-64", "gpu-h100-32")
TIMEOUT_S = 1800.0
SETTLED_ROWS = 10
WATCHED = Path(__file__).parent / "watched.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to be searched.

    Attributes:
      args: of its script.
      space: as of `search`.
      baseline: the mesh that it uses today.
    """

    script: Path
    args: tuple[str, ...] = ()
    space: str = "auto"
    baseline: str = ""


STEPS: Mapping[str, Step] = {
    "readme": Step(script=EXAMPLES / "dense_lm.py", args=("--size", "8b"), space="dense_lm"),
    "moe_lm": Step(script=EXAMPLES / "moe_lm.py", args=("--size", "8x7b"), space="moe_lm"),
    "long_context": Step(
        script=EXAMPLES / "long_context.py", args=("--size", "8b-128k"), space="long_context"
    ),
    # 7,201 arrays in 600 unrolled layers.
    "many_arrays": Step(script=ROOT / "benchmarks" / "support" / "scripts" / "many_arrays.py"),
}


def main(
    step: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(STEPS)}, or a script.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="By default two.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="A checkout of automesh to be timed in turn.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 1,
    after: Annotated[
        str, typer.Option(help="A target that is searched before, in the same folder.")
    ] = "",
) -> None:
    """Times the first answer of dry runs."""
    versions = {"now": ROOT, **({"before": against} if against is not None else {})}
    answer: dict[str, Any] = {}
    for name in step or list(STEPS):
        one = STEPS.get(name) or Step(script=Path(name))
        for aim in target or TARGETS:
            runs: dict[str, list[dict[str, Any]]] = {version: [] for version in versions}
            for _ in range(repeat):
                for version, checkout in versions.items():
                    try:
                        runs[version].append(timed(one, aim, checkout))
                        said = said_of(runs[version][-1])
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        said = str(error)
                    print(f"{name} for {aim}, {version}: {said}", file=sys.stderr, flush=True)
            found = answer[f"{Path(name).stem} {aim}"] = compared(runs)
            if after and runs["now"]:
                second = timed(one, aim, ROOT, after=after)
                found[f"after {after}"] = second_search(runs["now"][0], second)
                print(
                    f"{name} for {aim}, after {after}: {said_of(second)}",
                    file=sys.stderr,
                    flush=True,
                )
    print(json.dumps(answer))


def timed(step: Step, target: str, checkout: Path, *, after: str = "") -> dict[str, Any]:
    """Runs one dry run in a study of its own.

    Args:
      after: a target that is searched before in the same folder, and not timed; empty for none.

    Raises:
      RuntimeError: it failed.
      subprocess.TimeoutExpired: it took more than half an hour.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "script": str(step.script),
            "target": target,
            "space": step.space,
            "args": list(step.args),
            "baseline": step.baseline,
            "budget": f"{TIMEOUT_S:.0f}s",
            "results": folder,
        }
        if after:
            watched({**wanted, "target": after}, checkout, folder)
        load, began_s = os.getloadavg()[0], time.time()
        done = watched(wanted, checkout, folder)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {**read(said, began_s), "load": round(load, 1)}


def watched(
    wanted: Mapping[str, Any], checkout: Path, folder: str
) -> subprocess.CompletedProcess[str]:
    """Runs `watched.py`; arguments and errors as of `timed`."""
    done = subprocess.run(
        [sys.executable, str(WATCHED), json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=folder,
    )
    if done.returncode != 0:
        script = Path(wanted["script"]).name
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr}")
    return done


def second_search(alone: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What a search saves that another target's search has gone before, and by how much its
    estimates differ.

    The terms of a set of axes may have been made at other sizes there.
    """
    off = [
        abs(second["estimates"][plan] / seconds - 1) if plan in second["estimates"] else math.inf
        for plan, seconds in alone["estimates"].items()
    ]
    return {
        "cpu_s": second["cpu_s"],
        "part_of_cpu": round(second["cpu_s"] / max(alone["cpu_s"], 1e-9), 2),
        "estimates_that_differ": sum(one > 0 for one in off),
        "largest_difference": max(off, default=0.0),
    }


def read(said: Sequence[Mapping[str, Any]], began_s: float) -> dict[str, Any]:
    """The figures of one run, from what it said.

    Args:
      said: its lines, the last one that of its end.
      began_s: of the clock of its lines.
    """
    *tables, end = said
    last = end["rows"][:SETTLED_ROWS]
    settled_s = end["at"]
    for table in reversed(tables):
        if not table["is_table"] or table["rows"][:SETTLED_ROWS] != last:
            break
        settled_s = table["at"]
    first_s = tables[0]["at"] if tables else end["at"]
    told = next((table for table in tables if table.get("is_settled")), end)
    return {
        "first_row_s": round(first_s - began_s, 2),
        "first_ten_settled_s": round(settled_s - began_s, 2),
        "told_settled_s": round(told["at"] - began_s, 2),
        "told_rightly": told["rows"][:SETTLED_ROWS] == last,
        "complete_s": round(end["at"] - began_s, 2),
        "cpu_s": round(end["cpu_s"], 1),
        "peak_mib": end["peak_mib"],
        "estimates": end["estimates"],
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of each version, the ratios of before to now, and whether all estimates are equal;
    nothing of a version whose runs have failed."""
    runs = {version: mine for version, mine in runs.items() if mine}
    names = (
        "first_row_s",
        "first_ten_settled_s",
        "told_settled_s",
        "complete_s",
        "cpu_s",
        "peak_mib",
        "load",
    )
    medians = {
        version: {name: statistics.median(run[name] for run in mine) for name in names}
        for version, mine in runs.items()
    }
    found: dict[str, Any] = dict(medians)
    if "now" in runs:
        found["plans"] = len(runs["now"][0]["estimates"])
    if len(medians) == 2:
        found["before_over_now"] = {
            name: round(medians["before"][name] / max(medians["now"][name], 1e-9), 2)
            for name in names[:5]
        }
        every = [run["estimates"] for mine in runs.values() for run in mine]
        found["estimates_equal"] = all(one == every[0] for one in every)
    return found


def said_of(run: Mapping[str, Any]) -> str:
    """One run in words."""
    return (
        f"first row after {run['first_row_s']:.1f} s, first ten settled after "
        f"{run['first_ten_settled_s']:.1f} s{'' if run['told_rightly'] else ' (told wrongly)'}, "
        f"told after {run['told_settled_s']:.1f} s, complete after {run['complete_s']:.1f} s "
        f"({run['cpu_s']:.0f} s of CPU, load {run['load']:.1f} before)"
    )
