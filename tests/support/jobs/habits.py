"""Runs scripts twice in one process: both runs must be the same.

    python -m tests.support.jobs.habits TARGET SCRIPT ...

Prints one JSON object: for each script its mesh, its notices, and the digest of its arguments in
each of the two runs; or the error. TARGET is that of devices that are not here, or `local`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from automesh.errors import AutomeshError
from automesh.hardware import parse_target
from automesh.hardware.compilers import absent_devices_of
from automesh.program.capture.build import captured_build
from automesh.program.capture.nouns import Discovery
from automesh.program.nouns import Entry, StepRef
from automesh.worker.handlers import jobs
from automesh.worker.handlers.scripts import showing_devices
from automesh.worker.messages import DiscoverJob


def digest(workload: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((workload.args, dict(workload.kwargs))):
        array = isinstance(leaf, jax.Array | np.ndarray)
        found.update(np.asarray(leaf).tobytes() if array else repr(leaf).encode())
    return found.hexdigest()[:12]


def look(target: str, script: str) -> dict[str, Any]:
    entry = Entry(kind="script", location=script, function="", argv=("--workdir=x", "--c.lr=0.5"))
    absent = None
    if target != "local":
        found = parse_target(target, os.environ).absent
        assert found is not None
        absent = absent_devices_of(found)
    try:
        seen = jobs.handle(DiscoverJob(step=StepRef(entry=entry, absent=absent)), lambda event: {})
        assert isinstance(seen, Discovery), seen
        entry = replace(entry, function=seen.capture.step.name, capture=seen.capture)
        sizes = tuple(size for _, size in seen.capture.mesh.axes)
        mesh = jax.make_mesh(
            sizes, seen.capture.mesh.names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
        )
        with showing_devices(absent, "step", as_one=True):
            digests = [digest(captured_build(entry)(mesh)) for _ in range(2)]
    except AutomeshError as error:
        return {"error": error.message, "hint": error.hint}
    return {"mesh": str(seen.capture.mesh), "notices": seen.notices, "digests": digests}


if __name__ == "__main__":
    seen = {Path(script).name: look(sys.argv[1], script) for script in sys.argv[2:]}
    sys.stdout.write("\n" + json.dumps(seen) + "\n")
