"""Searches by a command in this process without running it: what its steps take is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from automesh.tuner.command import search
from automesh.tuner.command.run import FinishedRun, Manner, Place
from automesh.tuner.command.step_times import SeenStep

COMMAND = "python train.py --fsdp {fsdp} --tp {tp}"
TARGET = "cpu:2"
_STEP = SeenStep(name="step", file="/a/train.py", line=7, argument_bytes=2**20, devices=2)


def run(manner: Manner, place: Place, words: tuple[str, ...], **_: object) -> FinishedRun:
    """A run whose steps take the more, the larger the last word is: so many milliseconds."""
    place.log.write_text(f"step 1, {words[-1]} ms\n")
    return FinishedRun(
        samples_s=(float(words[-1]) / 1e3,) * manner.steps,
        losses=(3.0, 2.0, 1.0),
        loss_dtype="float32",
        step=_STEP,
    )


def install(put: Callable[[object, str, Any], None]) -> None:
    """Lets searches by a command run nothing; `put` is like `monkeypatch.setattr`."""
    put(search, "run", run)
