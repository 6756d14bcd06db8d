"""Builds scripts with and without their arrays, in a process of its own, and compares the steps.

    python -m tests.support.jobs.abstract_script MESHES SPLIT SCRIPT [ARGS]

MESHES are such as dp:4/dp:2,tp:2.

Prints one JSON object: for each mesh the step's arguments and a hash of its program, both ways.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from automesh.errors import AutomeshError
from automesh.mesh.axes import parse_mesh
from automesh.partition.haliax_support import restore_removed_names
from automesh.program.capture.abstract.record import seen
from automesh.program.capture.build import captured_build
from automesh.program.capture.discover import discover
from automesh.program.capture.nouns import parse_splits
from automesh.program.lower.lowering import lower
from automesh.program.nouns import Entry
from automesh.program.script.build import build_on


def most_resident_bytes() -> int:
    """Of this program alone: `ru_maxrss` begins with what the process that started it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kibibytes) * 1024


def leaf_text(leaf: Any) -> str:
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return f"{getattr(leaf, 'dtype', type(leaf))}{getattr(leaf, 'shape', ())} {tuple(spec or ())}"


def main(meshes: str, split: str, script: str, *argv: str) -> dict[str, Any]:
    restore_removed_names()
    entry = Entry(kind="script", location=script, function="", argv=argv)
    try:
        bare = discover(entry, bare=True)
    except AutomeshError as error:
        return {"error": error.message, "hint": error.hint}
    made: dict[str, Any] = {
        "resident": most_resident_bytes(),
        "peak": seen().most_bytes,
        "printed": list(map(str, seen().printed)),
    }
    live = sum(array.nbytes for array in jax.live_arrays())
    if not meshes:
        return {"step": bare.capture.step.name, "live": live, **made}
    real = discover(entry)
    same = replace(bare, notices=()) == replace(
        real, capture=replace(real.capture, without_arrays=True)
    )
    found: dict[str, Any] = {}
    for mesh in meshes.split("/"):
        both = []
        for discovery in (real, bare):
            capture = replace(discovery.capture, splits=parse_splits(split.split()))
            searched = capture.searched
            built = build_on(
                captured_build(replace(entry, function=capture.step.name, capture=capture)),
                parse_mesh(mesh, searched.names),
                axis_types=searched.axis_types,
            )
            leaves = jax.tree.leaves((built.workload.args, dict(built.workload.kwargs)))
            text = lower(built).lowered.as_text()
            both.append(
                {
                    "leaves": list(map(leaf_text, leaves)),
                    "program": hashlib.sha256(text.encode()).hexdigest(),
                    "real": sum(isinstance(leaf, jax.Array) for leaf in leaves),
                }
            )
        found[mesh] = both
    return {"same": same, "meshes": found, "live": live, **made}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*sys.argv[1:])) + "\n")
