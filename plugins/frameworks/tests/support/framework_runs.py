"""What the tests of the frameworks' adapters have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tests.support.paths import ROOT


def mesh(**sizes: int) -> Mesh:
    """The first devices, with axes of these sizes."""
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def forget(package: str, *cached: Callable[..., Any]) -> None:
    """As if a framework, or a stand-in for it, had never been imported.

    Args:
      cached: functions of its adapter that keep what they have found.
    """
    for function in cached:
        function.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[name]


def run_module(
    *words: str,
    cwd: Path,
    limit_s: float = 1800.0,
    variables: Mapping[str, str] | None = None,
    sees_cwd: bool = False,
) -> str:
    """What `python -m WORDS` prints on eight virtual devices; it must succeed.

    Args:
      variables: more of its environment.
      sees_cwd: it imports modules that lie in `cwd`, and so do the processes that it starts.
    """
    paths = [str(ROOT), *([str(cwd)] if sees_cwd else []), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env={
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "8",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
            **(variables or {}),
        },
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout
