"""A program whose mesh is a flag, for the tests: it computes nothing, and says what a step takes.

A step takes less the more is on `--fsdp`, so that the best plan is known. What it shall do wrong is
told by further flags, for the plans for which it shall do so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--metrics", default="", help="file of JSON lines")
    parser.add_argument("--runs", default="", help="file to which every run adds lines")
    parser.add_argument("--enough", type=int, default=0, help="step at which a run is complete")
    parser.add_argument("--wrong", default="", help="WHAT:TP, what goes wrong where tp is TP")
    parser.add_argument("--noise", type=float, default=0.0, help="of the loss, from run to run")
    parser.add_argument("--sleep", type=float, default=0.002)
    given = parser.parse_args()
    what, _, where = given.wrong.partition(":")
    wrong = what if where in ("", str(given.tp)) else ""
    if given.fsdp * given.tp != int(os.environ["JAX_NUM_CPU_DEVICES"]):
        sys.exit(f"{given.fsdp} x {given.tp} is not the number of devices")
    note(given.runs, "begin", given)
    if wrong == "raise":
        raise ValueError("heads are not divisible")
    if wrong == "memory":
        sys.exit("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4096.")
    if wrong == "background":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if wrong == "hang":
        time.sleep(1000)
    step_s = 0.010 * (1 + 0.3 * (given.tp - 1)) * (0.9 if given.remat == "full" else 1.0)
    loss = 2.0 + given.noise * (os.getpid() % 97) + (0.5 if wrong == "loss" else 0.0)
    for step in range(given.steps):
        seconds = step_s * (50.0 if step < 2 else 1.0 + 0.01 * (step % 3))
        if wrong != "silent":
            print(f"step {step}, loss {loss / (step + 1):.4f}, {1000 * seconds:.3f} ms", flush=True)
            report(given.metrics, {"step": step, "step_time_ms": 1000 * seconds, "loss": loss})
        if step + 1 == given.enough:
            note(given.runs, "enough", given)
        time.sleep(given.sleep)
    note(given.runs, "end", given)


def note(file: str, event: str, given: argparse.Namespace) -> None:
    """Adds a line about this run."""
    if file:
        run = os.environ.get("AUTOMESH_RUN", "none")
        with Path(file).open("a") as lines:
            lines.write(f"{event} {run} {given.fsdp}x{given.tp} {os.getpid()}\n")


def report(file: str, row: dict[str, float]) -> None:
    if file:
        with Path(file).open("a") as lines:
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
