"""Levanter's own training command up to its first step: prints the mesh that it makes, the rows of
a device in a microbatch, and the fingerprint of the step that it would run, as JSON on the last
line.

    python -m plugins.frameworks.tests.support.levanter_training \\
      --config_path config.yaml --trainer.seed 1 ...
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from levanter import config  # pyright: ignore[reportMissingImports]
from levanter.main import train_lm  # pyright: ignore[reportMissingImports]
from levanter.trainer import Trainer  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint


class _FirstStepError(BaseException):
    """Ends the training where its first step would begin."""


def _first_step(trainer: Any, name: str, step: Any, *args: Any) -> None:
    """In the place of the method through which a trainer calls its jitted step."""
    mesh = trainer.device_mesh
    found = fingerprint(
        step.lower(*args),
        device_ids=[device.id for device in mesh.devices.flat],
        compiler_options=(),
        platform="cpu",
    )
    told = {
        "fingerprint": found,
        "step": name,
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "per_device_parallelism": trainer.config.per_device_parallelism,
    }
    print(json.dumps(told))
    raise _FirstStepError


def main() -> None:
    Trainer._maybe_save_jaxpr = _first_step
    try:
        config.main(train_lm.main)()
    except _FirstStepError:
        sys.stdout.flush()
        # Threads that Levanter leaves running may abort the interpreter while it ends.
        os._exit(0)
    raise SystemExit("the training ended without a step")


if __name__ == "__main__":
    main()
