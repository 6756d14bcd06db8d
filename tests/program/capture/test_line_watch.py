"""The line at which a script is stopped from outside."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.outcomes import TimedOut
from automesh.program.capture.line_watch import last_line, line_noted
from automesh.program.nouns import Entry
from automesh.report.progress import Silent
from automesh.tuner.preparation import step_ref
from automesh.tuner.request import SearchRequest
from automesh.tuner.script import capture
from automesh.tuner.script.capture import _ended_at  # pyright: ignore[reportPrivateUsage]
from automesh.tuner.workers import surroundings_of
from automesh.worker.messages import DiscoverJob
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


def test_that_jax_compiles_or_computes_is_noted(tmp_path: Path) -> None:
    """A script whose first step took minutes was told to find what it waits for."""
    tmp_path.chmod(0o700)
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            if (now := last_line(str(tmp_path))) is not None:
                seen.add(now.doing)

    def program(x: jax.Array) -> jax.Array:
        for _ in range(1000):  # XLA needs seconds, whoever else has the cores.
            x = jnp.sin(x @ x)
        return jax.pure_callback(slowly, jax.ShapeDtypeStruct((8, 8), jnp.float32), x)

    def slowly(x: np.ndarray) -> np.ndarray:
        time.sleep(2)
        return np.asarray(x)

    looking = threading.Thread(target=look)
    with line_noted(str(tmp_path)):
        looking.start()
        print(jax.jit(program)(jnp.ones((8, 8))))
    is_over.set()
    looking.join()
    assert seen >= {"compiles", "computes"}


@pytest.mark.parametrize(("absent", "dry"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("doing", ["", "compiles", "computes"])
def test_the_words_on_a_first_run_that_did_not_end(
    tmp_path: Path, doing: str, absent: bool, dry: bool
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "line").write_bytes(f"train.py:12\n{doing}".encode().ljust(64, b"\0"))
    (tmp_path / "line").chmod(0o600)
    entry = Entry(kind="script", location="/somewhere/train.py", function="")
    target = parse_target("tpu-v5p-16" if absent else "cpu:8", {})
    job = DiscoverJob(step=step_ref(entry, target), folder=str(tmp_path), measures_nothing=dry)
    late = TimedOut(stage="build", limit_s=300, log_tail="epoch 3\n")
    error = _ended_at(late, entry, job)
    said = f"did not end within 5 min; it was at train.py:12{f', which jax {doing}' * bool(doing)}"
    assert error.message.endswith(said)
    assert error.hint.endswith("; the end of its output:\n  epoch 3")
    assert error.hint.startswith("give it a smaller model" if doing else "find what it waits for")
    assert ("--dry-run" in error.hint) == (bool(doing) and not absent and not dry)


def test_what_a_script_failed_with_is_told_if_its_run_by_itself_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        def run(self, _: object, timeout_s: float, on_event: Callable[[object], None]) -> TimedOut:
            on_event({"event": "failed", "text": "train.py fails at train.py:5: no such file"})
            return TimedOut(stage="alone", limit_s=timeout_s)

    monkeypatch.setattr(capture, "one_worker", lambda *_, **__: nullcontext(Late()))
    entry = Entry(kind="script", location="/somewhere/train.py", function="")
    target = parse_target("cpu:8", {})
    job = DiscoverJob(step=step_ref(entry, target))
    request = SearchRequest(subject=entry)
    with pytest.raises(UsageError, match=r"fails at train\.py:5: no such file") as caught:
        capture._first_run(request, job, surroundings_of(target), Silent())  # pyright: ignore
    assert "was being run by itself, and had not ended" in caught.value.hint


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
