"""MaxText's own training command up to its first step: prints the mesh that it logs and the
fingerprint of the step that it would run, as JSON on the last line.

    python -m plugins.frameworks.tests.support.maxtext_training mesh.yml key=value ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
from maxtext.utils import train_utils  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint


class _FirstStepError(BaseException):
    """Ends the training where its first step would begin."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A jitted step that says what it is when it is lowered or called."""

    step: Any

    def lower(self, *args: Any, **kwargs: Any) -> None:
        mesh = jax.tree.leaves(args)[0].sharding.mesh
        found = fingerprint(
            self.step.lower(*args, **kwargs),
            device_ids=[device.id for device in mesh.devices.flat],
            compiler_options=(),
            platform="cpu",
        )
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        print(json.dumps({"fingerprint": found, "mesh": sizes}))
        raise _FirstStepError

    __call__ = lower


def main(argv: list[str]) -> None:
    made = train_utils.jit_train_and_eval_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        step, evaluation = made(*args, **kwargs)
        return _Watched(step), evaluation

    train_utils.jit_train_and_eval_step = watched
    try:
        train.main(["train", *argv])
    except _FirstStepError:
        return
    raise SystemExit("the training ended without a step")


if __name__ == "__main__":
    main(sys.argv[1:])
