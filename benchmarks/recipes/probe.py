"""Which compiler options does the installed compiler take?

    python -m benchmarks.recipes.probe NAME=VALUE...

Each is tried on a program that does nothing, for one chip of v5e: compilers do not list their
options, and refuse a whole program for the sake of one. What is refused is printed as JSON, by
`NAME=VALUE`, with the reason. Imports jax: `refused_options` runs it as a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from automesh.hardware import parse_target
from automesh.hardware.compilers import absent_devices_of
from automesh.space.options import value_of
from automesh.worker.environment import environment, surroundings_for
from benchmarks.support.paths import ROOT

_TARGET = "v5e:2x2"
_LONGEST = 200
_UNKNOWN = ("No such compile option", "While setting option")


def refused_options(
    options: Iterable[str], kept: Path, versions: Mapping[str, str]
) -> dict[str, str]:
    """Those options that the compiler refuses, by `NAME=VALUE`, with the reasons.

    Args:
      options: `NAME=VALUE` each.
      kept: file in which the answers of one set of versions are kept.

    Raises:
      RuntimeError: the compiler could not be asked.
    """
    asked = list(dict.fromkeys(options))
    known: dict[str, str] = {}
    if kept.exists():
        data = json.loads(kept.read_text("utf-8"))
        known = data["answers"] if data["versions"] == dict(versions) else {}
    if unasked := [one for one in asked if one not in known]:
        known |= dict.fromkeys(unasked, "") | _asked(unasked)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"versions": dict(versions), "answers": known}, indent=1))
    return {one: known[one] for one in asked if known[one]}


def _asked(options: Sequence[str]) -> dict[str, str]:
    absent = parse_target(_TARGET, {}).absent
    assert absent is not None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recipes.probe", *options],
        env=environment(
            {**os.environ, "PYTHONPATH": str(ROOT)}, surroundings_for(absent_devices_of(absent))
        ),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the compiler could not be asked for its options: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(options: Sequence[str]) -> dict[str, str]:
    """What this process's compiler refuses."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from automesh.program.absent.client import devices_of

    absent = parse_target(_TARGET, {}).absent
    assert absent is not None
    on = SingleDeviceSharding(devices_of(absent_devices_of(absent))[0])
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=on))
    refused: dict[str, str] = {}
    for one in options:
        name, _, value = one.partition("=")
        chosen: Any = {name: value_of(value)}
        try:
            lowered.compile(compiler_options=chosen)
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            if any(words in str(error) for words in _UNKNOWN):
                refused[one] = " ".join(str(error).split())[:_LONGEST]
    return refused


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1:])))
