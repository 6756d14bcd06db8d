"""The steps that a search compiles for plans of EasyDeL's, one after another in one process: prints
their fingerprints, each on a line of its own.

python -m plugins.frameworks.tests.support.easydel_step \\
  train.yaml 'fsdp:4,tp:2 gradient_checkpointing=none' ...
"""

from __future__ import annotations

import sys
from typing import Any

from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh_frameworks.steps.easydel import build

_NAMES = ("dp", "fsdp", "ep", "tp", "sp")


def main(settings: str, plans: list[str]) -> None:
    sys.argv = ["easydel", "--config", settings]
    for plan in plans:
        mesh, *words = plan.split()
        knobs: dict[str, Any] = dict(word.split("=") for word in words)
        knobs = {name: int(value) if value.isdigit() else value for name, value in knobs.items()}
        built = build_on(build, parse_mesh(mesh, _NAMES), knobs=tuple(knobs.items()))
        print(lower(built).fingerprint(()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
