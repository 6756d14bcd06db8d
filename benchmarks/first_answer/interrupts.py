"""`python -m benchmarks.first_answer.interrupts`: whoever stops a dry run gets what is known.

A dry run is stopped at random moments of its time, by Ctrl-C (SIGINT to all of its processes, as a
terminal sends it) or by SIGTERM in turn, and the same command goes on from there, until one ends by
itself; then a new study begins. Each must end soon, with its exit code and with the table of the
plans that are estimated, and leave no process behind; what is complete in the end must equal an
undisturbed run. The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.first_answer.command import STEPS, Step
from benchmarks.support.search_process import SearchProcess

TIMEOUT_S = 900.0
LEFT_S = 10.0  # after which nothing that a search started may live


def main(
    step: Annotated[str, typer.Option(help=f"One of {', '.join(STEPS)}, or a script.")] = "readme",
    target: Annotated[str, typer.Option()] = "tpu-v5p-64",
    interrupts: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Stops dry runs at random moments."""
    one, luck = STEPS.get(step) or Step(script=Path(step).absolute()), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        whole = begun(one, target, folder, "whole")
        code = whole.finish(TIMEOUT_S)
        if code != 0:
            raise RuntimeError(f"{one.script.name} ended with {code}:\n{whole.words}")
        whole_s = time.monotonic() - whole.began_s
        print(f"undisturbed: {whole_s:.1f} s", file=sys.stderr, flush=True)
        ends: list[dict[str, Any]] = []
        study = 0
        while len(ends) < interrupts:
            number = signal.SIGTERM if len(ends) % 2 else signal.SIGINT
            after_s = luck.uniform(0.0, whole_s)
            end = stopped(begun(one, target, folder, f"study-{study}"), number, after_s)
            if end is None:
                study += 1
                continue
            ends.append(end)
            print(f"stopped after {after_s:.1f} s: {end}", file=sys.stderr, flush=True)
        last = begun(one, target, folder, f"study-{study}")
        is_equal = last.finish(TIMEOUT_S) == 0 and table(last.printed) == table(whole.printed)
    print(json.dumps({**counted(ends), "goes_on_to_the_same_table": is_equal}))


def begun(step: Step, target: str, folder: Path, study: str) -> SearchProcess:
    """Begins a dry run, or goes on with it."""
    words = [str(step.script), "--target", target, "--space", step.space, "--dry-run"]
    words += ["--results", str(folder / study), "--budget", "1h"]
    words += ["--baseline", step.baseline] if step.baseline else []
    return SearchProcess([*words, *(("--", *step.args) if step.args else ())], folder)


def stopped(search: SearchProcess, number: signal.Signals, after_s: float) -> dict[str, Any] | None:
    """Stops a dry run after some seconds, and says how it ended; None if it ended by itself."""
    while not search.has_ended and time.monotonic() - search.began_s < after_s:
        time.sleep(0.01)
    if search.has_ended:
        search.finish(TIMEOUT_S)
        return None
    began_s = time.monotonic()
    os.killpg(search.pid, number)
    code = search.finish(TIMEOUT_S)
    took_s = time.monotonic() - began_s
    left, _ = search.survivors(LEFT_S)
    # Before its first line Python itself is still starting, and its own message is a traceback.
    is_up = bool(search.said) and "... " in search.words
    return {
        "signal": number.name,
        "exit_code": code,
        "took_s": round(took_s, 2),
        "is_ranked": "first ranked: " in search.words,
        "has_table": "step time" in search.printed,
        "is_sentence": "Traceback" not in search.words or not is_up,
        "left": len(left),
    }


def table(printed: str) -> str:
    """What is printed in front of the names of files."""
    return printed.partition("\nsaved")[0]


def counted(ends: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts how stopped runs ended."""
    lost = [one for one in ends if one["is_ranked"] and not one["has_table"]]
    return {
        "interrupts": len(ends),
        "with_a_table": sum(one["has_table"] for one in ends),
        "nothing_estimated_yet": sum(not one["is_ranked"] for one in ends),
        "estimated_but_no_table": len(lost),
        "tracebacks": sum(not one["is_sentence"] for one in ends),
        "processes_left": sum(one["left"] for one in ends),
        "exit_codes": dict(Counter(str(one["exit_code"]) for one in ends)),
        "longest_end_s": max((one["took_s"] for one in ends), default=0.0),
    }


if __name__ == "__main__":
    typer.run(main)
