"""Which compiler options does the installed compiler take, on a kind of TPU?

    echo '["--xla_...=true", ...]' | python -m benchmarks.recipes.probe v6e

Compilers do not list their options, and refuse a whole program for the sake of one. Each is tried
on a program that does nothing, for the smallest slice; then all together: some are refused only
beside others, and only on some chips. Imports jax: `Probe` runs it as a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.hardware import parse_target
from automesh.hardware.compilers import absent_devices_of
from automesh.space.options import value_of
from automesh.worker.environment import environment, surroundings_for
from benchmarks.support.paths import ROOT

_SLICES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "7x:2x2x1",
}
_LONGEST = 200
_UNKNOWN = ("No such compile option", "While setting option")
_TOGETHER = "refused beside the others"

Compile = Callable[[Sequence[str]], str]


@dataclass(slots=True, kw_only=True)
class Probe:
    """Asks the compiler, and keeps the answers of one set of versions in a file."""

    path: Path
    versions: Mapping[str, str]

    def refused(self, generation: str, options: Sequence[str]) -> dict[str, str]:
        """Those options, `NAME=VALUE` each, that the compiler refuses, with the reasons.

        Raises:
          RuntimeError: the compiler could not be asked.
        """
        answers: dict[str, dict[str, str]] = {}
        if self.path.exists():
            data = json.loads(self.path.read_text("utf-8"))
            answers = data["answers"] if data["versions"] == dict(self.versions) else {}
        key = " ".join([generation, *options])
        if options and key not in answers:
            answers[key] = _asked(generation, options)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"versions": dict(self.versions), "answers": answers}, indent=1)
            self.path.write_text(text, "utf-8")
        return answers.get(key, {})


def _asked(generation: str, options: Sequence[str]) -> dict[str, str]:
    absent = parse_target(_SLICES[generation], {}).absent
    assert absent is not None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recipes.probe", generation],
        env=environment(
            {**os.environ, "PYTHONPATH": str(ROOT)}, surroundings_for(absent_devices_of(absent))
        ),
        input=json.dumps(list(options)),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the compiler could not be asked for its options: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def refused_by(fails: Compile, options: Sequence[str]) -> dict[str, str]:
    """What has to be left out so that a program is compiled.

    Args:
      fails: compiles with options; why it failed, or nothing.
    """
    refused: dict[str, str] = {}
    for one in options:
        reason = fails([one])
        if any(words in reason for words in _UNKNOWN):
            refused[one] = reason[:_LONGEST]
    left = [one for one in options if one not in refused]
    while reason := fails(left):
        spoiler = next(
            (one for one in left if not fails([other for other in left if other != one])), ""
        )
        if not spoiler:
            break  # The program is at fault, or several are: the search is going to say it.
        left.remove(spoiler)
        refused[spoiler] = f"{_TOGETHER}: {reason}"[:_LONGEST]
    return refused


def compiles_with(generation: str) -> Compile:
    """A compile of a program that does nothing, for a kind of TPU."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from automesh.program.absent.client import devices_of

    absent = parse_target(_SLICES[generation], {}).absent
    assert absent is not None
    on = SingleDeviceSharding(devices_of(absent_devices_of(absent))[0])
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=on))

    def fails(options: Sequence[str]) -> str:
        parts = [one.partition("=") for one in options]
        chosen: Any = {name: value_of(value) for name, _, value in parts}
        try:
            lowered.compile(compiler_options=chosen)
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        return ""

    return fails


if __name__ == "__main__":
    print(json.dumps(refused_by(compiles_with(sys.argv[1]), json.load(sys.stdin))))
