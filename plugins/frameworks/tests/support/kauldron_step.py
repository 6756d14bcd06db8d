"""The steps that a search compiles for plans of Kauldron's: prints their fingerprints as JSON, on
the last line.

    python -m plugins.frameworks.tests.support.kauldron_step \\
      'devices:8' 'devices:8 params=REPLICATED' -- --cfg=...

They are the steps of a training under way: see `compile_program`.
"""

from __future__ import annotations

import json
import sys

from automesh.mesh.axes import Scalar, parse_mesh
from automesh.program.lower.lowering import compile_program, lower
from automesh.program.script.build import build_on
from automesh_frameworks.steps.kauldron import build

_TRUTH: dict[str, Scalar] = {"False": False, "True": True}


def _fingerprint(plan: str) -> str:
    mesh, *settings = plan.split()
    pairs = (one.partition("=") for one in settings)
    knobs = tuple((name, _TRUTH.get(value, value)) for name, _, value in pairs)
    names = tuple(part.partition(":")[0] for part in mesh.split(","))
    program, _ = compile_program(lower(build_on(build, parse_mesh(mesh, names), knobs=knobs)), ())
    return program.fingerprint(())


def main(argv: list[str]) -> None:
    place = argv.index("--")
    sys.argv = ["kauldron", *argv[place + 1 :]]
    print(json.dumps([_fingerprint(plan) for plan in argv[:place]]))


if __name__ == "__main__":
    main(sys.argv[1:])
