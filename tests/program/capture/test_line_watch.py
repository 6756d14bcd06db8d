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
        until_s = time.monotonic() + 60
        said = ""
        while not said and time.monotonic() < until_s:
            said = last_line(str(tmp_path))
    file, _, line = said.rpartition(":")
    assert file.endswith(Path(__file__).name)
    assert abs(int(line) - frame.f_lineno) < 5
    assert last_line(str(tmp_path)) == said or last_line(str(tmp_path)).startswith(file)
    assert last_line("") == ""


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
