"""The line at which a script is stopped from outside."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest

from automesh.program.capture.line_watch import last_line, line_noted
from tests.program.capture.test_run_script import searched


def test_the_line_that_runs_is_noted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with line_noted(str(tmp_path)):
        frame = inspect.currentframe()
        assert frame is not None
        until_s = time.monotonic() + 300
        said = None
        while said is None and time.monotonic() < until_s:
            said = last_line(str(tmp_path))
    assert said is not None
    assert said.doing == ""
    file, _, line = said.line.rpartition(":")
    assert file.endswith(Path(__file__).name)
    assert abs(int(line) - frame.f_lineno) < 15
    again = last_line(str(tmp_path))
    assert again is not None and again.line.startswith(file)
    assert last_line("") is None


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["compiles", "computes"])
def test_a_script_that_jax_works_on_is_not_said_to_wait(tmp_path: Path, doing: str) -> None:
    """A large step, which is run once before its second call shows what comes back."""
    script = tmp_path / "train.py"
    script.write_text(COMPILES if doing == "compiles" else COMPUTES)
    done = searched(script, tmp_path, "--target", "cpu:1", "--dry-run", "--timeout", "25s")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"did not end within 25 s; it was at train.py:9, which jax {doing}" in said
    assert "which compiles and computes nothing of it before its step is known" in said
    assert f"up to its step (at train.py:9, which jax {doing}), " in said


COMPILES = """
import jax, jax.numpy as jnp
@jax.jit
def program(x):
    for _ in range(2500):
        x = jnp.sin(x @ x)
    return x
x = jnp.ones((8, 8))
print(program(x))
"""
COMPUTES = """
import jax, jax.numpy as jnp
@jax.jit
def long(x):
    return jax.lax.fori_loop(0, 10**9, lambda _, x: jnp.tanh(x @ x), x)


x = long(jnp.ones((64, 64)))
print(x)
"""

LARGE = """
import jax, numpy as np
mesh = jax.make_mesh((jax.device_count(),), ("data",))
kept = []
for _ in range(100):
    kept.append(np.ones((64, 1024, 1024), np.float32))
"""


@pytest.mark.slow
def test_a_script_that_is_killed_for_its_memory_is_told_with_its_line(tmp_path: Path) -> None:
    """That it ran out of memory was all that was said."""
    script = tmp_path / "train.py"
    script.write_text(LARGE)
    limit = ("--worker-memory", "3GiB")
    done = searched(script, tmp_path, "--target", "cpu:4", "--dry-run", *limit)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "the script ran out of memory at train.py:6: killed by automesh because of" in said
