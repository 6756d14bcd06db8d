"""How good are the shardings that nobody wrote?

    python -m benchmarks.infer [--step NAME ...] [--target tpu-v5p-16] [--compile | --measure]

Each step of `benchmarks/infer/steps` is a script for one device, in the style of one of several
libraries. `automesh search --infer` searches it for the target: by estimates alone, with
`--compile` by the target's own compiler as well (the best plan and pure data parallelism), with
`--measure` on virtual CPU devices, up to a rule, whose numerics are compared with one device.
Estimates and compiles take the large sizes of a step, measurements the small ones.

What is done is kept in `results/infer` and is not repeated, as long as the step and the kind of run
are the same. `--again` repeats it. Steps whose library is not installed (`pip install dm-haiku`)
are left out by name.

The last line is one JSON object: for each step its classes, the best plan, its time against that
of pure data parallelism, both with the memory of a device, and what the search verified.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.infer.summary import Summary, summary_of

STEPS = Path(__file__).parent / "steps"
KEPT = Path("results/infer")
_PACKAGES = {"haiku": "dm-haiku", "flax": "flax", "equinox": "equinox", "optax": "optax"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.infer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", nargs="*", default=[], help="only these steps")
    parser.add_argument("--target", default="tpu-v5p-16", help="devices of estimates and compiles")
    parser.add_argument("--small", action="store_true", help="estimate the small sizes")
    parser.add_argument("--again", action="store_true", help="repeat what is kept")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", action="store_true", help="compile the best plan and dp")
    how.add_argument("--measure", action="store_true", help="measure on 8 virtual CPU devices")
    how.add_argument("--kept", action="store_true", help="only show what is kept")
    options = parser.parse_args()
    chosen = _chosen(options.step)
    kind = "compiled" if options.compile else "measured" if options.measure else "estimated"
    found: dict[str, Summary] = {}
    for number, step in enumerate(chosen, start=1):
        size = [] if options.measure or options.small else ["large"]
        target = "cpu:8" if options.measure else options.target
        kept = KEPT / f"{step.stem}-{target.replace(':', '')}-{kind}-{_digest(step, size)}.json"
        if kept.exists() and not options.again:
            found[step.stem] = json.loads(kept.read_text(encoding="utf-8"))
        elif options.kept:
            continue
        elif missing := _missing(step):
            _say(f"{number}/{len(chosen)} {step.stem}: left out, `pip install {missing}`")
            continue
        else:
            _say(f"{number}/{len(chosen)} {step.stem} for {target}, {kind}")
            said = _search(step, target, kind, size)
            found[step.stem] = summary_of(said)
            if "error" not in said:  # What failed is tried again.
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(found[step.stem], indent=1), encoding="utf-8")
        _say(f"    {json.dumps(found[step.stem])}")
    print(json.dumps({"target": options.target, "kind": kind, **_overall(found), "steps": found}))


def _chosen(names: Sequence[str]) -> list[Path]:
    every = {path.stem: path for path in sorted(STEPS.glob("*.py"))}
    unknown = [name for name in names if name not in every]
    if unknown:
        sys.exit(f"no step is called {', '.join(unknown)}; there are {', '.join(every)}")
    return [every[name] for name in names] if names else list(every.values())


def _digest(step: Path, size: Sequence[str]) -> str:
    return hashlib.sha256(step.read_bytes() + "".join(size).encode()).hexdigest()[:8]


def _missing(step: Path) -> str:
    """The first package that a step imports and that is not installed; empty if all are."""
    imported = re.findall(r"^(?:import|from) (\w+)", step.read_text(encoding="utf-8"), re.MULTILINE)
    for name in imported:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            return _PACKAGES[name]
    return ""


def _search(step: Path, target: str, kind: str, size: Sequence[str]) -> Mapping[str, Any]:
    """The result of a search as JSON; `{"error": ...}` if it fails."""
    how = {
        "estimated": ["--dry-run"],
        "compiled": ["--top", "1", "--budget", "15m"],
        "measured": ["--top", "3", "--budget", "6m"],
    }[kind]
    place = KEPT / "searches"
    command = [sys.executable, "-m", "automesh", "search", str(step), "--infer", "--json"]
    command += ["--target", target, *how, "--results", str(place)]
    command += ["--rules", str(place / f"{step.stem}.toml")]
    ended = subprocess.run([*command, "--", *size], capture_output=True, text=True, check=False)
    try:
        return json.loads(ended.stdout)
    except json.JSONDecodeError:
        lines = [line for line in ended.stderr.splitlines() if line.startswith(("error", "hint"))]
        return {"error": " ".join(lines) or f"exit status {ended.returncode}"}


def _overall(found: Mapping[str, Summary]) -> dict[str, Any]:
    """Of the steps that have a best plan: how many, how often it is more than dp, and how much
    faster it is than dp."""
    done = [one for one in found.values() if "best" in one]
    times = [one["faster_than_dp"] for one in done if one.get("faster_than_dp")]
    return {
        "searched": len(found),
        "with_a_plan": len(done),
        "best_is_not_dp": sum(
            not one["best"].startswith("dp:") or "," in one["best"].split()[0] for one in done
        ),
        "at_least_1.2_times_faster_than_dp": sum(ratio >= 1.2 for ratio in times),
        "dp_does_not_fit": sum(one.get("dp_fits") is False for one in done),
        "faster_than_dp_geometric_mean": statistics.geometric_mean(times) if times else None,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
