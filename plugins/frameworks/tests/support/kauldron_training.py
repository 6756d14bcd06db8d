"""Kauldron's own training command up to its third step: prints the fingerprint of that step, and
how many devices hold its arguments, as JSON on the last line.

    python -m plugins.frameworks.tests.support.kauldron_training \\
      --cfg=config.py --cfg.workdir=... ...

The state that comes out of the first step may be laid out otherwise than the one that goes in. Each
step gives its losses: other iterations than those that are logged leave them out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
from absl import app
from kauldron import main as training  # pyright: ignore[reportMissingImports]
from kauldron.train import train_step  # pyright: ignore[reportMissingImports]

from automesh.program.lower.lowered import fingerprint

_STEP = 3
_LOGS = "--cfg.log_metrics_every=1"


class _EnoughError(BaseException):
    """Ends the training where its third step would begin."""


def main(argv: list[str]) -> None:
    own = train_step.TrainStep.step
    calls: list[int] = []

    def watched(self: Any, state: Any, batch: Any, **settings: Any) -> Any:
        calls.append(int(state.step))
        if len(calls) < _STEP:
            return own(self, state, batch, **settings)
        assert settings["return_losses"]
        devices = jax.tree.leaves(batch)[0].sharding.mesh.devices
        lowered = own.lower(self, state, batch, **settings)
        found = fingerprint(
            lowered,
            device_ids=[device.id for device in devices.flat],
            compiler_options=(),
            platform="cpu",
        )
        splits = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
        print(json.dumps({"fingerprint": found, "devices": devices.size, "split": splits}))
        raise _EnoughError

    train_step.TrainStep.step = watched
    sys.argv = ["kauldron", *argv, _LOGS]  # Where Kauldron looks for keys, too.
    try:
        app.run(training.main, sys.argv, flags_parser=training._flags_parser)
    except _EnoughError:
        return
    raise SystemExit("the training ended before its third step")


if __name__ == "__main__":
    main(sys.argv[1:])
