"""Infers the classes of scripts that make no mesh, all in this process.

    python -m tests.support.jobs.inferred_scripts SCRIPT...

Prints one JSON object: classes by script. A process of its own, because capture changes `jax.jit`
for good.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from automesh import jsonio
from automesh.program.capture.discover import discover
from automesh.program.infer.nouns import StepClasses
from automesh.program.nouns import Entry


def inferred(script: str) -> object:
    with contextlib.redirect_stdout(io.StringIO()):
        found = discover(Entry(kind="script", location=script, function=""))
    return jsonio.to_json(found.classes, StepClasses)


if __name__ == "__main__":
    found = {Path(script).stem: inferred(script) for script in sys.argv[1:]}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
