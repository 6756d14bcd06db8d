"""What a process loads before it can do anything: others wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "pandas", "scipy", "optuna", "sqlalchemy")
COMMAND = ("automesh.cli.app", "automesh.api", "automesh.tuner.start", "automesh.tuner.dry_run")


@pytest.mark.parametrize(
    ("modules", "kept"),
    [
        (COMMAND, ()),
        (("automesh.worker.handlers.jobs",), ("jax", "jaxlib")),
    ],
    ids=["a dry run, before it starts its workers", "a worker"],
)
def test_what_takes_long_to_import_is_left_for_those_who_need_it(
    modules: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & set(HEAVY) == set(kept)
