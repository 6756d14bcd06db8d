"""One mutant against the tests that run its line, in a copy of the repository."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.mutants.places import Mutant

# Tests that stand beside the module are asked first, and this many at once: most mutants end there.
_FIRST = 300
# A mutant that loops for ever is caught by this: so many times what its tests took, and a start.
_PATIENCE, _START_S = 6.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Attributes:
    outcome: `caught` by a test that fails, or by one that no longer ends; `lives` if all pass;
        `not run` if no test of the ten-minute run comes by its line.
    tests: how many run the line.
    asked: how many of these were run, if none of them failed before.
    by: the test that failed, or the last lines of the run where none is named.
    """

    outcome: Literal["caught", "lives", "not run"]
    tests: int
    asked: int
    by: str


def judge(
    mutant: Mutant, tests: list[str], seconds: dict[str, float], copy: Path, most_s: float
) -> Result:
    """Puts the mutant into a copy of the repository, runs the tests, and takes it out again.

    Args:
      tests: that run the line, the fastest first.
      seconds: what each of them takes.
      most_s: tests beside the module are all asked; of the others, as many as take this long
        together. So a mutant may be said to live that a slower test would have caught.
    """
    if not tests:
        return Result(outcome="not run", tests=0, asked=0, by="")
    path = copy / mutant.file
    original = path.read_text("utf-8")
    path.write_text(mutant.code, "utf-8")
    try:
        near = [test for test in tests if _is_beside(test, mutant.file)]
        far = _within([test for test in tests if test not in set(near)], seconds, most_s)
        for some in (near[:_FIRST], near[_FIRST:] + far):
            if some and (by := _failure(some, seconds, copy)) is not None:
                return Result(outcome="caught", tests=len(tests), asked=len(near) + len(far), by=by)
    finally:
        path.write_text(original, "utf-8")
    return Result(outcome="lives", tests=len(tests), asked=len(near) + len(far), by="")


def judge_beside(mutant: Mutant, seconds: dict[str, float], copy: Path) -> Result:
    """Runs all tests in the folder beside a module, with those written since `lines` was run."""
    folder = Path("tests", *Path(mutant.file).parent.parts[1:])
    while not any((copy / folder).glob("test_*.py")):
        folder = folder.parent
    inside = [s for test, s in seconds.items() if test.startswith(f"{folder.as_posix()}/")]
    path = copy / mutant.file
    original = path.read_text("utf-8")
    path.write_text(mutant.code, "utf-8")
    try:
        by = _failure([folder.as_posix()], {folder.as_posix(): sum(inside)}, copy)
    finally:
        path.write_text(original, "utf-8")
    outcome = "lives" if by is None else "caught"
    return Result(outcome=outcome, tests=len(inside), asked=len(inside), by=by or "")


def _within(tests: list[str], seconds: dict[str, float], most_s: float) -> list[str]:
    """The first tests that take `most_s` together."""
    ends = itertools.accumulate(seconds.get(test, 0.0) for test in tests)
    return [test for test, end in zip(tests, ends, strict=True) if end <= most_s]


def _is_beside(test: str, file: str) -> bool:
    """Tests of `automesh/cost/pricing.py` are in `tests/cost`."""
    return test.split("/")[1:-1] == file.split("/")[1:-1]


def _failure(tests: list[str], seconds: dict[str, float], copy: Path) -> str | None:
    arguments = copy / "selected-tests.txt"
    arguments.write_text("".join(f"{test}\n" for test in tests), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-o", "addopts="]
    command += ["-p", "no:cacheprovider", "--tb=line", "-m", "not slow and not long"]
    command += [f"@{arguments}"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    patience_s = _START_S + _PATIENCE * sum(seconds.get(test, 0.0) for test in tests)
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"does not end in {patience_s:.0f} s"
    if process.returncode == 0:
        return None
    named = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0] if named else " / ".join(output.splitlines()[-3:])
