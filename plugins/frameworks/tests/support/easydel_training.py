"""EasyDeL's own training command up to its first step: prints the mesh that its model has and the
fingerprint of the step that it would run, as JSON on the last line.

    python -m plugins.frameworks.tests.support.easydel_training --config train.yaml
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import easydel  # pyright: ignore[reportMissingImports]
from easydel.scripts import elarge  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint


class _FirstStepError(BaseException):
    """Ends the training where its first step would begin."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A jitted step that says what it is when it is called."""

    step: Any
    mesh: Any

    def __call__(self, *args: Any) -> None:
        found = fingerprint(
            self.step.lower(*args),
            device_ids=[device.id for device in self.mesh.devices.flat],
            compiler_options=(),
            platform="cpu",
        )
        sizes = {name: size for name, size in self.mesh.shape.items() if size > 1}
        print(json.dumps({"fingerprint": found, "mesh": sizes}), flush=True)
        raise _FirstStepError


def main(argv: list[str]) -> None:
    trainer = easydel.Trainer
    made = trainer.configure_functions

    def watched(self: Any) -> Any:
        functions = made(self)
        step = _Watched(functions.sharded_training_step_function, functions.mesh)
        functions.sharded_training_step_function = step
        return functions

    trainer.configure_functions = watched
    try:
        elarge.main(argv)
    except _FirstStepError:
        return
    raise SystemExit("the training ended without a step")


if __name__ == "__main__":
    main(sys.argv[1:])
