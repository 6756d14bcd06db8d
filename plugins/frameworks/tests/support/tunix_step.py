"""The step that a search compiles for a plan of Tunix's: prints the fingerprints of the program of
its first call, and of the one that a search compiles, as JSON on the last line.

python -m plugins.frameworks.tests.support.tunix_step \\
  'fsdp:4,tp:2 remat_config=3' config.yaml key=value ...
"""

from __future__ import annotations

import json
import sys

from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import compile_program, lower
from automesh.program.script.build import build_on
from automesh_frameworks.steps.tunix import build
from plugins.frameworks.tests.support.tunix_small import use_small_model


def main(plan: str, argv: list[str]) -> None:
    mesh, *settings = plan.split()
    pairs = (setting.split("=") for setting in settings)
    sys.argv = ["tunix", *argv]
    use_small_model()
    built = build_on(
        build,
        parse_mesh(mesh, ("fsdp", "tp")),
        knobs=tuple((name, int(value)) for name, value in pairs),
    )
    first = lower(built)
    settled, _ = compile_program(first, ())
    print(json.dumps({"first": first.fingerprint(()), "compiled": settled.fingerprint(())}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
