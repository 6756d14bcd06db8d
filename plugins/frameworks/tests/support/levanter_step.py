"""The step that a search compiles for a plan of Levanter's: prints its fingerprint on the last
line.

    python -m plugins.frameworks.tests.support.levanter_step \\
      'data:4,model:2 microbatches=2' --config_path config.yaml
"""

from __future__ import annotations

import sys
from typing import Any

from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh_frameworks.steps.levanter import build

_NAMES = ("data", "replica", "model")


def main(plan: str, argv: list[str]) -> None:
    mesh, *settings = plan.split()
    knobs: dict[str, Any] = dict(setting.split("=") for setting in settings)
    knobs = {name: int(value) if value.isdigit() else value for name, value in knobs.items()}
    sys.argv = ["levanter", *argv]
    built = build_on(build, parse_mesh(mesh, _NAMES), knobs=tuple(knobs.items()))
    print(lower(built).fingerprint(()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
