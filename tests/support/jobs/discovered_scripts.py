"""Finds the steps of scripts under capture, all in this process.

    python -m tests.support.jobs.discovered_scripts FOLDER

Each script may have a first line `# step=NAME bare`, for the options that it is run with. Prints
one JSON object: what was found, by script. A process of its own, because capture changes `jax.jit`
for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from automesh.errors import AutomeshError
from automesh.program.capture.discover import discover
from automesh.program.capture.step_call import TracedCall
from automesh.program.nouns import Entry


def found_in(script: Path) -> dict[str, Any]:
    first = script.read_text().partition("\n")[0]
    words = first.removeprefix("#").split() if first.startswith("#") else []
    step = next((word[5:] for word in words if word.startswith("step=")), "")
    printed = io.StringIO()
    has_values: list[bool] = []

    def keep(call: TracedCall, *_: Any) -> None:
        arrays = [leaf for leaf in call.leaves if hasattr(leaf, "shape")]
        has_values.append(all(isinstance(one, (jax.Array, jax.Ref, np.ndarray)) for one in arrays))

    try:
        with contextlib.redirect_stdout(printed):
            entry = Entry(kind="script", location=str(script), function="")
            found = discover(entry, step=step, bare="bare" in words, keep=keep)
    except AutomeshError as error:
        return {"error": error.message, "hint": error.hint, "printed": printed.getvalue()}
    return {
        **dataclasses.asdict(found.capture.step),
        "words": found.capture.step.in_words(),
        "about_outside": found.capture.step.about_outside(),
        "num_carried": sum(run.count for run in found.capture.step.carried),
        "others": {one.name: one.calls for one in found.other_steps},
        "batch_axes": list(found.batch_axes),
        "notices": list(found.notices),
        "printed": printed.getvalue(),
        "has_values": has_values == [True],
    }


if __name__ == "__main__":
    scripts = sorted(Path(sys.argv[1]).glob("*.py"))
    sys.stdout.write("\n" + json.dumps({one.stem: found_in(one) for one in scripts}) + "\n")
