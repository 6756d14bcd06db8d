"""Searches for absent devices without their compilers: see `tests.support.handlers.absent`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automesh.cost.replay.timeline import Slice, Timeline
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, ReplayOutcome
from automesh.tuner import context, session, several_targets, start, workers
from automesh.tuner.compile.replay import Player
from automesh.worker.pool import Pool
from tests.support.cases.bad_inputs import GOOD
from tests.support.worker_jobs import ROOT

TARGET = "v5e:2x4"
# The five axes of the shipped spaces, of which two vary.
SPACE = "[axes]\ndp = {}\nfsdp = { size = 1 }\nep = { size = 1 }\ntp = {}\nsp = { size = 1 }\n"
Set = Callable[[object, str, Any], None]


def replayed(plan: Plan) -> ReplayOutcome:
    """The more devices along tp, the slower: all of it waits for links."""
    tp, slow = plan.sizes["tp"], len(plan.compiler_options)
    wait_s = 1e-4 * (tp + slow)
    return ReplayOutcome(
        step_s=1e-3 + wait_s,
        bracket_s=(1e-3, 2e-3 + wait_s),
        causes=(("compute", 1e-3), ("ici tp", wait_s)),
        communication_s=(("ici tp", 2 * wait_s),),
        busy_s=(("core", 1e-3),),
        mfu=0.4,
    )


def play(self: Player, plan: Plan, compiled: Compiled) -> tuple[ReplayOutcome, Timeline]:
    stored = self.store.find(compiled.stored)
    assert stored is not None and stored.module == b"a module"
    found = replayed(plan)
    work = Slice(kind="work", track="core", name="dot.1", start_s=0.0, seconds=found.step_s)
    return found, Timeline(step_s=found.step_s, slices=(work,))


def install(put: Set) -> None:
    """Lets searches in this process compile without compilers.

    Args:
      put: sets an attribute, as `monkeypatch.setattr` does.
    """
    pool = functools.partial(Pool, handler="tests.support.handlers.absent")
    put(context, "Pool", pool)
    put(workers, "Pool", pool)
    put(session, "Pool", pool)
    for module in (start, several_targets):
        put(module, "check_compilable", lambda _: None)
    put(Player, "play", play)


def folder_for_search(folder: Path, space: str = SPACE) -> Path:
    (folder / "train.py").write_text(GOOD)
    (folder / "space.toml").write_text(space)
    return folder


def main() -> None:
    """`python -m tests.support.fakes.absent_search ARGUMENTS`: the command, without compilers."""
    install(setattr)
    from automesh.cli.app import main as command

    command()


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = ROOT
    main()
