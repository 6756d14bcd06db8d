"""The step that a search compiles for a plan of AXLearn's: prints its fingerprint on the last line.

python -m plugins.frameworks.tests.support.axlearn_step \\
  'fsdp:4,model:2 remat_policy=None' --module=... --config=...
"""

from __future__ import annotations

import sys
from typing import Any

from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh_frameworks.steps.axlearn import build

_NAMES = ("fsdp", "data", "expert", "seq", "model", "pipeline")


def main(plan: str, argv: list[str]) -> None:
    mesh, *settings = plan.split()
    knobs: dict[str, Any] = dict(setting.split("=") for setting in settings)
    knobs = {name: int(value) if value.isdigit() else value for name, value in knobs.items()}
    sys.argv = ["axlearn", *argv]
    built = build_on(build, parse_mesh(mesh, _NAMES), knobs=tuple(knobs.items()))
    print(lower(built).fingerprint(()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
