"""What the storage tests share: backends, plans, outcomes, and a process of a search."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Compiled, Counts, Measured, Memory
from automesh.tuner.study.scope import EVERYTHING, Scope
from automesh.tuner.study.storage import Storage
from automesh.tuner.study.study import Study, open_study

BACKENDS = ("sqlite", "journal", "postgres")
VERSIONS = (("python", "3.11"), ("jax", "0.10.2"))
SOURCE = "source-1"


def plans(count: int) -> list[Plan]:
    """That many different plans."""
    axes = (MeshAxis(name="dp", ici=4), MeshAxis(name="tp", ici=2))
    return [Plan(axes=axes, knobs=(("microbatches", number + 1),)) for number in range(count)]


def compiled(step_s: float, fingerprint: str = "f00d") -> Compiled:
    memory = Memory(
        argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=2, peak_bytes=4
    )
    counts = Counts(flops=10, hbm_bytes=20, collectives=())
    return Compiled(
        fingerprint=fingerprint, memory=memory, counts=counts, step_s=step_s, compile_s=0.5
    )


def measured(step_s: float, *, raced_out: bool = False) -> Measured:
    return Measured(
        step_s=step_s,
        interval_s=(step_s * 0.9, step_s * 1.1),
        rounds_s=(step_s,),
        losses=(2.0, float("nan")),
        numerics="unverified",
        numerics_detail="the loss of step 2 is not finite",
        values="synthetic",
        raced_out=raced_out,
        confirmed=not raced_out,
        peak_bytes=0,
    )


def opened(storage: Storage, *, source_hash: str = SOURCE, scope: Scope = EVERYTHING) -> Study:
    return open_study(
        storage, "lm-cpu-8-1234", source_hash=source_hash, versions=VERSIONS, scope=scope
    )


def work(storage: Storage, todo: Sequence[Plan], journal: Path, seed: int) -> None:
    """One process of a search: leads if it can, claims, and finishes until nothing is left.

    Appends `open seconds leads` to `journal`, and `number step_s` after each stored result.
    """
    dice = random.Random(seed)
    began = time.monotonic()
    with opened(storage) as study:
        leads = study.lead()
        _note(journal, f"open {time.monotonic() - began} {leads}")
        while True:
            trial = study.compile.claim()
            if trial is None:
                trials = study.compile.trials()
                if len(trials) == len(todo) and not any(one.is_open for one in trials):
                    return
                if study.lead():
                    study.compile.adopt_expired()
                    study.compile.enqueue(todo[: len(trials) + 16])
                else:
                    time.sleep(0.05)
                continue
            time.sleep(dice.uniform(0, 0.004))
            step_s = dice.uniform(0.1, 1.0)
            if study.compile.finish(trial, compiled(step_s)) == "stored":
                _note(journal, f"{trial.number} {step_s}")


def _note(journal: Path, line: str) -> None:
    # One write of one line: whole in the file once it returns, also if the process is killed next.
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)
