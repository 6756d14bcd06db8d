"""AXLearn's own training command up to its first step: prints the mesh and the fingerprint of the
step that it would run, as JSON on the last line.

    python -m plugins.frameworks.tests.support.axlearn_training \\
      --module=... --config=... --mesh_selector=...

The state is made and the first batch is read, as in any training; what ends is the step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from absl import app
from axlearn.common import (  # pyright: ignore[reportMissingImports]
    launch_trainer_main,
    measurement,
)
from axlearn.common.trainer import SpmdTrainer  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint


class _FirstStepError(BaseException):
    """Ends the training where its first step would begin."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A jitted step that says what it is when it is lowered: AXLearn compiles before it calls."""

    step: Any
    mesh: Any

    def lower(self, *args: Any) -> None:
        found = fingerprint(
            self.step.lower(*args),
            device_ids=[device.id for device in self.mesh.devices.flat],
            compiler_options=(),
            platform="cpu",
        )
        sizes = {name: size for name, size in self.mesh.shape.items() if size > 1}
        print(json.dumps({"fingerprint": found, "mesh": sizes}))
        raise _FirstStepError


def main() -> None:
    trainer: Any = SpmdTrainer
    made = trainer._pjit_train_step

    def watched(self: Any) -> Any:
        return _Watched(made(self), self.mesh())

    trainer._pjit_train_step = watched
    measurement.define_flags()
    try:
        app.run(launch_trainer_main.main)
    except _FirstStepError:
        return
    raise SystemExit("the training ended without a step")


if __name__ == "__main__":
    main()
