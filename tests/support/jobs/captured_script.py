"""Runs scripts under capture in a process of its own: what they tell, and their losses on meshes.

    python -m tests.support.jobs.captured_script MESHES STEP SPLIT SCRIPT [ARGS]

MESHES are such as dp:4/dp:2,tp:2.

Prints one JSON object. A process of its own, because capture changes `jax.jit` for good.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from automesh.errors import AutomeshError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.capture.nouns import parse_splits
from automesh.program.nouns import Entry, StepRef
from automesh.worker.handlers import jobs
from automesh.worker.messages import DiscoverJob, VisitJob


def emit(event: dict[str, Any]) -> dict[str, Any]:
    return {}


def main(meshes: str, step: str, split: str, script: str, *argv: str) -> dict[str, Any]:
    entry = Entry(kind="script", location=script, function="", argv=argv)
    try:
        found = jobs.handle(DiscoverJob(step=StepRef(entry=entry), wanted=step), emit)
    except AutomeshError as error:
        return {"error": error.message, "hint": error.hint}
    capture = replace(found.capture, splits=parse_splits(split.split()))
    entry = replace(entry, function=capture.step.name, capture=capture)
    losses = {}
    for mesh in filter(None, meshes.split("/")):
        visit = VisitJob(
            step=StepRef(entry=entry, axis_types=capture.searched.axis_types),
            plan=Plan(axes=parse_mesh(mesh, capture.searched.names)),
            cache_dir="",
            steps=1,
            samples=1,
            loss_steps=3,
        )
        # Twice: the second time with arguments that were kept on the host.
        seen = [jobs.handle(visit, emit) for _ in range(2)]
        assert all(one.values == "user" for one in seen)
        losses[mesh] = [one.losses for one in seen]
    return {
        "mesh": str(capture.mesh),
        "made_at": str(capture.mesh.made_at),
        "axis_types": capture.mesh.axis_types,
        "step": capture.step.name,
        "called_at": str(capture.step.called_at),
        "argument_bytes": capture.step.argument_bytes,
        "carried": sum(run.count for run in capture.step.carried),
        "batch_axes": found.batch_axes,
        "others": [one.name for one in found.other_steps],
        "losses": losses,
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*sys.argv[1:])) + "\n")
