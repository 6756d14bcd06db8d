"""Single runs of commands, as real processes: how they end, what is found, who is left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from automesh.errors import UsageError
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.tuner.command.run import (
    FinishedRun,
    Manner,
    Place,
    RunResult,
    Unseen,
    recovered,
    run,
)
from automesh.tuner.command.step_times import JsonLines, Printed, Source
from automesh.worker.messages import Surroundings
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import MEBIBYTE, living

FLAGS = str(SCRIPTS / "flags.py")
PRINTED = Printed(pattern=r"loss (?P<loss>[0-9.]+), (?P<ms>[0-9.]+) ms")
STEP_S = 0.010


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """One failing test must not make all others fail."""
    yield
    for process in living():
        process.kill()


def manner(tmp_path: Path, source: Source = PRINTED, **changes: object) -> Manner:
    made = Manner(
        program=sys.executable,
        surroundings=Surroundings(platforms="cpu", cpu_devices=8),
        source=source,
        skip=2,
        steps=6,
        timeout_s=60.0,
        memory_limit_bytes=500 * MEBIBYTE,
        cache_dir=tmp_path / "cache",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def place(tmp_path: Path) -> Place:
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    return Place(logs=logs, name="run-0003")


def flags(*words: str) -> tuple[str, ...]:
    return ("python", FLAGS, "--fsdp", "8", *words)


def do(
    how: Manner, where: Place, words: tuple[str, ...], seen: list[int] | None = None
) -> RunResult:
    return run(
        how,
        where,
        words,
        clock=time.monotonic,
        pulse=lambda: None,
        on_steps=(seen if seen is not None else []).append,
    )


def test_a_run_is_ended_when_its_steps_are_timed(tmp_path: Path) -> None:
    seen: list[int] = []
    runs = tmp_path / "runs"
    where = place(tmp_path)
    result = do(manner(tmp_path), where, flags("--runs", str(runs)), seen)
    assert isinstance(result, FinishedRun)
    assert len(result.samples_s) >= 6
    # The first two, which take fifty times as long, do not count.
    assert min(result.samples_s) >= STEP_S and max(result.samples_s) < 1.1 * STEP_S
    assert result.losses == (2.0, 1.0, 0.6667)
    assert seen == sorted(set(seen)) and seen[-1] >= 8
    events = [line.split()[:3] for line in runs.read_text().splitlines()]
    assert events == [["begin", "run-0003", "8x1"]]
    assert "step 0, loss 2.0000" in where.log.read_text()
    assert living() == []


def test_what_it_put_into_the_background_ends_with_it(tmp_path: Path) -> None:
    assert isinstance(
        do(manner(tmp_path), place(tmp_path), flags("--wrong", "background")), FinishedRun
    )
    assert living() == []


def test_a_file_of_json_lines_in_a_folder_of_the_run(tmp_path: Path) -> None:
    where = place(tmp_path)
    how = manner(tmp_path, JsonLines(file="{run_dir}/m.jsonl"))
    result = do(how, where, flags("--metrics", f"{where.run_dir}/m.jsonl"))
    assert isinstance(result, FinishedRun)
    assert result.losses == (2.0, 2.0, 2.0)
    assert min(result.samples_s) >= STEP_S and max(result.samples_s) < 1.1 * STEP_S


def test_a_shared_file_of_json_lines_is_read_from_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"step_time_ms": 7000.0}\n' * 50)
    how = manner(tmp_path, JsonLines(file=str(file), key="step_time_ms"))
    result = do(how, place(tmp_path), flags("--metrics", str(file)))
    assert isinstance(result, FinishedRun)
    assert max(result.samples_s) < 1.1 * STEP_S


def test_a_run_that_ends_by_itself_before_counts_with_what_it_has(tmp_path: Path) -> None:
    result = do(manner(tmp_path), place(tmp_path), flags("--steps", "4"))
    assert isinstance(result, FinishedRun)
    assert len(result.samples_s) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--steps", "2"), "only 2 step times were found, and the first 2 are skipped"),
        (("--steps", "1", "--wrong", "silent"), "no line that the command printed matches"),
    ],
)
def test_a_run_without_times_says_why(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    result = do(manner(tmp_path), place(tmp_path), flags(*words))
    assert isinstance(result, Unseen)
    assert reason in result.reason


def test_a_run_that_raises(tmp_path: Path) -> None:
    result = do(manner(tmp_path), place(tmp_path), flags("--wrong", "raise"))
    assert isinstance(result, Failed)
    assert result.reason == ("exit code 1 (logs/run-0003.log): ValueError: heads are not divisible")
    assert result.log_tail.splitlines()[0].startswith("Traceback")


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    code = "import os, signal; print('dying', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    result = do(manner(tmp_path), place(tmp_path), ("python", "-c", code))
    assert isinstance(result, Failed)
    assert result.reason == "killed by signal 11 (logs/run-0003.log): dying"


def test_a_device_without_memory(tmp_path: Path) -> None:
    result = do(manner(tmp_path), place(tmp_path), flags("--wrong", "memory"))
    assert isinstance(result, OutOfMemory)
    assert (result.needed_bytes, result.is_host) == (4096, False)
    assert "RESOURCE_EXHAUSTED" in result.detail and "logs/run-0003.log" in result.detail


def test_a_run_that_takes_more_memory_than_it_may(tmp_path: Path) -> None:
    code = "import time; held = bytearray(b'x' * 10**8); time.sleep(60)"
    how = manner(tmp_path, memory_limit_bytes=50 * MEBIBYTE)
    result = do(how, place(tmp_path), ("python", "-c", code))
    assert isinstance(result, OutOfMemory)
    assert result.is_host and result.limit_bytes == 50 * MEBIBYTE
    assert living() == []


def test_a_run_that_takes_too_long(tmp_path: Path) -> None:
    how = manner(tmp_path, timeout_s=1.0)
    result = do(how, place(tmp_path), flags("--wrong", "hang"))
    assert isinstance(result, TimedOut)
    assert result.limit_s == 1.0
    assert living() == []


@pytest.mark.slow
def test_what_was_timed_before_the_time_was_over_counts(tmp_path: Path) -> None:
    how = manner(tmp_path, timeout_s=4.0, steps=10**6)
    result = do(how, place(tmp_path), flags())
    assert isinstance(result, FinishedRun)
    assert 3 <= len(result.samples_s) < 10**6


def test_an_exception_between_ends_the_run(tmp_path: Path) -> None:
    def pulse() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            manner(tmp_path),
            place(tmp_path),
            flags("--wrong", "hang"),
            clock=time.monotonic,
            pulse=pulse,
            on_steps=lambda _: None,
        )
    assert living() == []


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    result = do(manner(tmp_path, program=str(broken)), place(tmp_path), ("broken",))
    assert isinstance(result, Failed)
    assert "was lost" in result.reason and "No such file" in result.reason


def test_the_environment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_dump_to=x")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "AUTOMESH_RUN")
    code = f"import os; print(*(os.environ[n] for n in {names!r}), 'PYTHONPATH' in os.environ)"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = place(tmp_path)
    do(manner(tmp_path), where, ("python", "-c", code))
    assert where.log.read_text() == "cpu 8 --xla_dump_to=x run-0003 False\n"


# What is left of a run whose search was killed


def test_a_run_that_was_complete_is_recovered(tmp_path: Path) -> None:
    how, where = manner(tmp_path), place(tmp_path)
    ran = do(how, where, flags())
    assert recovered(how, where) == ran
    where.clear()
    assert recovered(how, where) is None


@pytest.mark.parametrize("words", [("--wrong", "raise"), ("--steps", "2"), ("--wrong", "memory")])
def test_a_run_that_ended_by_itself_is_recovered(tmp_path: Path, words: tuple[str, ...]) -> None:
    how, where = manner(tmp_path), place(tmp_path)
    result = do(how, where, flags(*words))
    assert not isinstance(result, FinishedRun)
    assert recovered(how, where) == result


def test_a_run_that_was_cut_short_is_not(tmp_path: Path) -> None:
    how, where = manner(tmp_path, steps=10**6), place(tmp_path)

    def pulse() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(how, where, flags(), clock=time.monotonic, pulse=pulse, on_steps=lambda _: None)
    assert recovered(how, where) is None
    # By the same steps it would be complete where fewer were asked for.
    assert isinstance(recovered(replace(how, steps=3), where), FinishedRun)


def test_a_stopped_command_is_killed_all_the_same(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    how = manner(tmp_path, timeout_s=1.0)
    assert isinstance(do(how, place(tmp_path), ("python", "-c", code)), TimedOut)
    assert living() == []


def test_a_search_that_cannot_start_processes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("automesh.worker.process.subprocess.Popen", refuse)
    with pytest.raises(UsageError, match="could not be started: resource temporarily unavailable"):
        do(manner(tmp_path), place(tmp_path), flags())
    with contextlib.suppress(psutil.Error):
        assert living() == []
