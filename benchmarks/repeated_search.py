"""The same search again and again: does it come to the same verdict, and does its table support it?

    python -m benchmarks.repeated_search [--example dense_lm] [--baseline fsdp:8] [--runs 10]

Each run is README's first command with `--new` and `--json`, in a folder of its own. A run
contradicts itself where a row that it shows as equal or as slower has an interval that says
otherwise, where the exported plan replaces the baseline without an interval below 1, or where it
keeps the baseline while a measured row is shown to be faster. The last line is one JSON object;
`--raw FILE` keeps one line for each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.paths import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one run ended.

    Attributes:
      best: the exported plan, as text; empty if there is none.
      is_changed: whether it has another mesh or other knobs than the baseline.
      has_other_mesh: whether it has another mesh than the baseline.
      speedup: baseline time over the exported plan's, and its 95 % interval.
      rows: (verdict, plan, ratio, low, high) of every measured row.
      contradictions: in words.
      wall_s: from the start of the command to its end.
    """

    best: str
    is_changed: bool
    has_other_mesh: bool
    speedup: float
    speedup_interval: tuple[float, float]
    rows: tuple[tuple[str, str, float, float, float], ...]
    contradictions: tuple[str, ...]
    wall_s: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--example", default="dense_lm")
    parser.add_argument("--baseline", default="fsdp:8")
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--raw", type=Path, help="file to which a line is added for each run")
    given = parser.parse_args(arguments)
    command = command_of(given.example, given.baseline, given.budget)
    print(" ".join(command[2:]), flush=True)
    verdicts: list[Verdict] = []
    for number in range(given.runs):
        verdicts.append(one := run(command))
        low, high = one.speedup_interval
        print(
            f"{number + 1}: {one.best or 'nothing'} {one.speedup:.2f}x ({low:.2f}x to {high:.2f}x) "
            f"in {one.wall_s:.0f} s {'; '.join(one.contradictions)}",
            flush=True,
        )
        if given.raw is not None:
            with given.raw.open("a") as file:
                file.write(json.dumps({"command": command[2:], **asdict(one)}) + "\n")
    print(json.dumps(summary(verdicts)))


def command_of(example: str, baseline: str, budget: str) -> list[str]:
    """README's first command, for one of the examples."""
    script, options = f"examples/{example}.py", ["--space", example, "--baseline", baseline]
    return [
        *(sys.executable, "-m", "automesh", "search", script, "--target", "cpu:8"),
        *(*options, "--budget", budget, "--new", "--json"),
    ]


def run(command: list[str]) -> Verdict:
    """Makes one run in a folder of its own.

    Raises:
      RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "search_spaces"):
            (Path(folder) / name).symlink_to(ROOT / name)
        began_s = time.monotonic()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall_s = time.monotonic() - began_s
    if done.returncode not in (0, 1):
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return verdict_of(json.loads(done.stdout), wall_s)


def verdict_of(result: dict[str, Any], wall_s: float) -> Verdict:
    """What a run said.

    Args:
      result: what `--json` prints.
    """
    best, baseline = result["best"], result["baseline"]
    rows = tuple(
        (one["verdict"], plan, one["ratio"], *one["interval"])
        for plan, one in ((row["plan"], row["standing"]) for row in result["candidates"])
        if one["verdict"] not in ("not_measured", "excluded")
    )
    if best is None:
        return Verdict(
            best="",
            is_changed=False,
            has_other_mesh=False,
            speedup=1.0,
            speedup_interval=(1.0, 1.0),
            rows=rows,
            contradictions=(),
            wall_s=wall_s,
        )
    low, high = best["speedup_interval"] or (1.0, 1.0)
    is_changed = best["plan"] != baseline
    return Verdict(
        best=best["plan"],
        is_changed=is_changed,
        has_other_mesh=best["plan"].partition(" ")[0] != baseline.partition(" ")[0],
        speedup=best["speedup"] or 1.0,
        speedup_interval=(low, high),
        rows=rows,
        contradictions=tuple(_contradictions(rows, is_changed=is_changed, low=low)),
        wall_s=wall_s,
    )


def _contradictions(
    rows: tuple[tuple[str, str, float, float, float], ...], *, is_changed: bool, low: float
) -> list[str]:
    found = ["replaced without being shown to be faster"] if is_changed and low <= 1.0 else []
    for verdict, plan, ratio, lowest, highest in rows:
        what = f"{plan} is {verdict} at {ratio:.2f} ({lowest:.2f} to {highest:.2f})"
        if (
            (verdict == "equal" and not lowest <= 1.0 <= highest)
            or (verdict == "slower" and lowest <= 1.0)
            or (highest < 1.0 and verdict != "undecided")
        ):
            found.append(what)
    return found


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """The figures of all runs."""
    changed = [one for one in verdicts if one.has_other_mesh]
    return {
        "runs": len(verdicts),
        "other_mesh": len(changed),
        "other_plan": sum(one.is_changed for one in verdicts),
        "nothing": sum(not one.best for one in verdicts),
        "best": dict(Counter(one.best for one in verdicts)),
        "median_speedup": statistics.median(one.speedup for one in verdicts),
        "least_low": min((one.speedup_interval[0] for one in changed), default=None),
        "contradictions": sum(len(one.contradictions) for one in verdicts),
        "undecided_rows": sum(row[0] == "undecided" for one in verdicts for row in one.rows),
        "median_wall_s": statistics.median(one.wall_s for one in verdicts),
        "longest_wall_s": max(one.wall_s for one in verdicts),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
