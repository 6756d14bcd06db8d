"""The pool against everything that user code may do in a worker."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from automesh.errors import Interrupted
from automesh.outcomes import Failed, TimedOut
from automesh.program.nouns import VisitAnswer
from automesh.worker import guardian
from automesh.worker import pool as pool_module
from automesh.worker.environment import environment
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool
from automesh.worker.process import Process
from tests.support.worker_jobs import (
    MEBIBYTE,
    ROOT,
    SLEEP_S,
    answer_of,
    failure_of,
    job,
    living,
    surroundings,
)

MakePool = Callable[..., Pool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools: list[Pool] = []

    def make(**changes: Any) -> Pool:
        settings: dict[str, Any] = {
            "size": 1,
            "surroundings": surroundings(),
            "log_dir": tmp_path / "logs",
            "memory_limit_bytes": 400 * MEBIBYTE,
            "handler": "tests.support.handlers.misbehaving",
        }
        pools.append(Pool(**{**settings, **changes}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert living() == []


def test_a_worker_answers_and_is_used_again(make_pool: MakePool) -> None:
    pool = make_pool()
    first = answer_of(pool.run(job("answer", "a"), 30))
    assert first.fingerprint == "a"
    assert first.samples_s == (0.5, float("inf"))
    assert str(first.losses) == "(nan, 2.0)"
    assert answer_of(pool.run(job("answer"), 30)).peak_bytes == first.peak_bytes


def test_recycling_gives_a_new_process_and_new_surroundings(make_pool: MakePool) -> None:
    pool = make_pool()
    first = answer_of(pool.run(job("answer"), 30)).peak_bytes
    pool.recycle()
    second = answer_of(pool.run(job("variables", "A"), 30))
    assert second.peak_bytes != first
    assert second.fingerprint == "unset"
    pool.recycle(surroundings(("A", "1"), cpu_devices=4))
    third = pool.run(job("variables", "A", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"), 30)
    assert answer_of(third).fingerprint == "1|4|cpu"


def test_recycling_retires_a_busy_worker_after_its_job(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.submit(job("sleep", "0.2"), 30)
    pool.recycle()
    pool.submit(job("answer"), 30)
    results = [answer_of(finished.result) for _ in range(2) for finished in pool.wait(30)]
    assert len({result.peak_bytes for result in results}) == 2


def test_jobs_run_beside_each_other_and_are_collected_as_they_end(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    slow = pool.submit(job("sleep", "1000"), 30)
    quick = [pool.submit(job("answer", str(i)), 30) for i in range(5)]
    alone = answer_of(pool.run(job("answer", "alone"), 30))
    assert alone.fingerprint == "alone"
    got = pool.wait(0)
    assert [finished.ticket for finished in got] == quick
    assert [answer_of(f.result).fingerprint for f in got] == list("01234")
    assert slow not in quick
    assert pool.unfinished == 1
    started = time.monotonic()
    assert pool.wait(0.2) == []
    assert 0.15 < time.monotonic() - started < 120  # The slow one lasts a thousand seconds.


def test_among_idle_workers_a_job_gets_the_one_of_its_affinity(make_pool: MakePool) -> None:
    pool = make_pool(size=2)

    def processes(*affinity: str) -> dict[str, int]:
        tickets = {pool.submit(job("sleep", "0.2"), 30, affinity=one): one for one in affinity}
        found: dict[str, int] = {}
        while pool.unfinished:
            for finished in pool.wait(30):
                found[tickets[finished.ticket]] = answer_of(finished.result).peak_bytes
        return found

    first = processes("a", "b")
    assert first["a"] != first["b"]
    assert processes("b", "a") == first
    assert processes("a", "b") == first
    assert processes("b") == {"b": first["b"]}


@pytest.mark.parametrize(("kills", "ends_well"), [(2, True), (9, False)])
def test_a_worker_that_is_killed_before_it_has_begun_is_no_failure(
    make_pool: MakePool, kills: int, ends_well: bool
) -> None:
    """Before, one kill while a worker started ended the whole search."""
    pool = make_pool()
    killed: set[int] = set()
    pool.submit(job("answer", "after all"), 30)
    end_s, finished = time.monotonic() + 300, pool.wait(0)
    while not finished and time.monotonic() < end_s:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_worker = "automesh.worker.child" in process.cmdline()
                if is_worker and process.pid not in killed and len(killed) < kills:
                    process.kill()
                    killed.add(process.pid)
        finished = pool.wait(0.01)
    result = finished[0].result
    if ends_well:
        assert answer_of(result).fingerprint == "after all"
        assert len(killed) == kills
    else:
        assert "while starting" in failure_of(result).reason
        assert len(killed) == 4


def test_waiting_for_nothing_returns_at_once(make_pool: MakePool) -> None:
    assert make_pool().wait() == []


@pytest.mark.parametrize("error", [KeyError("x"), Interrupted("stop"), KeyboardInterrupt()])
def test_an_exception_of_the_listener_comes_out_and_the_pool_goes_on(
    make_pool: MakePool, error: BaseException
) -> None:
    pool = make_pool()

    def on_event(event: dict[str, Any]) -> None:
        raise error

    with pytest.raises(type(error)):
        pool.run(job("ask"), 30, on_event)
    (finished,) = pool.wait(30)
    assert "the search failed" in failure_of(finished.result).reason
    assert answer_of(pool.run(job("answer"), 30))


def test_time_that_the_caller_is_away_does_not_count(make_pool: MakePool) -> None:
    pool = make_pool()
    answer_of(pool.run(job("answer"), 30))
    pool.submit(job("ask"), 0.5)
    time.sleep(1.0)
    (finished,) = pool.wait(30)
    answer_of(finished.result)
    slow = pool.submit(job("ask"), 0.5, lambda _: time.sleep(0.4))
    (finished,) = pool.wait(30)
    assert finished.ticket == slow
    answer_of(finished.result)


def test_polling_makes_progress(make_pool: MakePool) -> None:
    pool, got = make_pool(), []
    pool.submit(job("ask"), 30)
    deadline = time.monotonic() + 300
    while not got and time.monotonic() < deadline:
        got = pool.wait(0)
        time.sleep(0.01)
    answer_of(got[0].result)


def test_the_next_job_starts_before_the_caller_looks_at_the_first(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    pool.submit(job("answer"), 30)
    pool.submit(job("hang"), 0.2)
    answer_of(pool.wait(30)[0].result)
    (log,) = (tmp_path / "logs").iterdir()
    deadline = time.monotonic() + 300
    while "hanging" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closing_starts_no_worker_for_the_job_that_it_ends(tmp_path: Path) -> None:
    """Before, the job of a worker that had served others went back into the queue, and began."""
    starts = 0

    def start(**arguments: Any) -> Process:
        nonlocal starts
        starts += 1
        return Process(**arguments)

    pool = Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path,
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
        start=start,
    )
    answer_of(pool.run(job("answer"), 30))
    pool.submit(job("hang"), 30)
    pool.close()
    assert starts == 1
    assert living() == []


def test_closing_again_waits_for_those_that_had_not_ended(tmp_path: Path) -> None:
    """A search closes a pool early and once more at its end; before, the second time failed if a
    worker of the first had taken seconds to end, as agents of a busy cluster do."""
    may_end = False

    class Slow(Process):
        def kill(self) -> None:
            if may_end:
                super().kill()

        def kill_deputy(self) -> None:
            if may_end:
                super().kill_deputy()

    pool = Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path,
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
        start=Slow,
    )
    answer_of(pool.run(job("answer"), 30))
    pool.close()
    assert living() != []
    pool.close()
    may_end = True
    deadline = time.monotonic() + 300
    while living():
        assert time.monotonic() < deadline
        pool.close()
    pool.close()


def test_pages_of_mapped_files_are_not_counted() -> None:
    spec = importlib.util.find_spec("jaxlib")
    assert spec is not None
    assert spec.origin is not None
    library = max(Path(spec.origin).parent.rglob("*.so"), key=lambda path: path.stat().st_size)
    size, me = library.stat().st_size, psutil.Process()
    looks = (guardian._resident_bytes, guardian._proportional_bytes)  # pyright: ignore[reportPrivateUsage]
    before = [look(me) for look in looks]
    with (
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        sum(mapped[:: mmap.PAGESIZE])
        for look, held in zip(looks, before, strict=True):
            assert look(me) < held + size // 2
    made = b"x" * size
    for look, held in zip(looks, before, strict=True):
        assert look(me) > held + len(made) // 2


@pytest.mark.slow
def test_pages_shared_with_forks_are_counted_once(make_pool: MakePool) -> None:
    answer_of(make_pool().run(job("share_memory_with_forks"), 30))


def test_a_flood_of_output_is_cut_in_the_middle(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool()
    failed = failure_of(pool.run(job("flood_and_crash", "100"), 60))
    assert "the end" in failed.log_tail
    (log,) = (tmp_path / "logs").iterdir()
    assert log.stat().st_size < 5 * MEBIBYTE
    text = log.read_text()
    assert text.startswith("--- visit dp:2 ---\nthe beginning")
    assert "bytes left out" in text


@pytest.mark.parametrize("then", ["crash", "kill group", "hang", "return"])
def test_nothing_that_a_job_started_outlives_its_worker(make_pool: MakePool, then: str) -> None:
    pool = make_pool()
    result = pool.run(job("leave_children", then, SLEEP_S), 1.5)
    expected = {"crash": Failed, "kill group": Failed, "hang": TimedOut, "return": VisitAnswer}
    assert isinstance(result, expected[then])
    if then == "return":  # its worker lives on, and what the job started with it
        assert len(living()) >= 6
    pool.close()
    assert living() == []


def test_a_worker_that_dies_idle_is_dropped_while_waiting(make_pool: MakePool) -> None:
    pool = make_pool(size=2)
    pool.submit(job("sleep", "1"), 30)
    answer_of(pool.run(job("die_later"), 30))
    (finished,) = pool.wait(30)
    answer_of(finished.result)


@pytest.mark.parametrize(
    ("changes", "reason", "tail"),
    [
        ({"handler": "not_a_module"}, "the worker could not start: ModuleNotFoundError", ""),
        (
            {
                "surroundings": Surroundings(
                    platforms="cpu", variables=(("PYTHONHOME", "/nowhere"),)
                )
            },
            "the worker was lost while starting",
            "No module named 'encodings'",
        ),
    ],
)
def test_a_worker_that_cannot_start_fails_its_job_once(
    make_pool: MakePool, changes: dict[str, Any], reason: str, tail: str
) -> None:
    pool = make_pool(**changes)
    for _ in range(2):
        failed = failure_of(pool.run(job("answer"), 30))
        assert failed.stage == "start"
        assert failed.reason.startswith(reason)
        assert tail in failed.log_tail


def test_a_worker_that_hangs_at_its_start_times_out(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.5)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'automesh.worker.child' in sys.orig_argv[2:4]: time.sleep(1000)\n"
    )
    pool = make_pool(surroundings=surroundings(("PYTHONPATH", f"{tmp_path}:{ROOT}")))
    result = pool.run(job("answer"), 30)
    assert isinstance(result, TimedOut)
    assert (result.stage, result.limit_s) == ("start", 0.5)


@pytest.mark.slow
def test_the_time_of_a_start_is_not_the_jobs(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_handler.py").write_text(
        "import time\ntime.sleep(1.5)\nfrom tests.support.handlers.misbehaving import handle\n"
    )
    pool = make_pool(
        handler="slow_handler", surroundings=surroundings(("PYTHONPATH", f"{tmp_path}:{ROOT}"))
    )
    answer_of(pool.run(job("answer"), 1.0))
    answer_of(pool.run(job("start_again", "1.5"), 1.0))
    late = pool.run(job("start_again_and_hang"), 1.0)
    assert isinstance(late, TimedOut)
    assert (late.stage, late.limit_s) == ("build", 1.0)
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 3.0)
    stuck = pool.run(job("start_again", "1000"), 30)
    assert isinstance(stuck, TimedOut)
    assert (stuck.stage, stuck.limit_s) == ("start", 3.0)


def test_a_death_at_the_start_is_laid_to_the_job_before(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool, mark = make_pool(), str(tmp_path / "mark")
    first = answer_of(pool.run(job("answer"), 30))
    again = answer_of(pool.run(job("abort_at_first_start", mark), 30))
    assert again.peak_bytes != first.peak_bytes
    (tmp_path / "mark").unlink()
    pool.recycle()
    failed = failure_of(pool.run(job("abort_at_first_start", mark), 30))
    assert failed.stage == "start"


def test_a_module_in_the_working_directory_replaces_none_of_pythons(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "signal", "psutil", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    result = answer_of(make_pool().run(job("where"), 30))
    assert result.fingerprint == f"{tmp_path} '' []"


def test_the_logs_of_many_workers_are_limited_in_number(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_KEPT_LOGS", 2)
    pool = make_pool()
    for _ in range(4):
        failure_of(pool.run(job("hard_exit", "1"), 30))
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_closing_is_quick_whatever_the_workers_do(make_pool: MakePool) -> None:
    pool = make_pool(size=3)
    for function in ("hang", "hang_holding_gil"):
        pool.submit(job(function), 30)
    pool.submit(job("leave_children", "hang", SLEEP_S), 30)
    pool.wait(1.5)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 120  # Its jobs last a thousand seconds.
    assert living() == []


def test_the_environment_is_explicit() -> None:
    base = {
        "HOME": "/h",
        "JAX_PLATFORMS": "tpu",
        # The parent's alone: users' code has no business with the storage.
        "AUTOMESH_STORAGE_PASSWORD": "kestrel",
        "AUTOMESH_STORAGE_PASSWORD_FILE": "/h/kestrel",
        "XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=4",
    }
    variables = environment(base, surroundings(("A", "b"), cpu_devices=8))
    assert variables == {
        "HOME": "/h",
        "A": "b",
        "PYTHONPATH": ROOT,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "AUTOMESH_CPU_DEVICES": "8",
        "XLA_FLAGS": "--xla_dump_to=x",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    unchanged = environment(base, surroundings())
    assert unchanged["XLA_FLAGS"] == base["XLA_FLAGS"]
    only_count = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert "XLA_FLAGS" not in environment(only_count, surroundings(cpu_devices=2))


@pytest.mark.parametrize(("own", "worker"), [("7", "7"), ("random", "random"), ("", "0")])
def test_the_seed_of_hashes_is_the_users_if_there_is_one(own: str, worker: str) -> None:
    assert environment({"PYTHONHASHSEED": own}, surroundings())["PYTHONHASHSEED"] == worker


def test_a_pool_without_room_is_refused(make_pool: MakePool) -> None:
    for changes in ({"size": 0}, {"memory_limit_bytes": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            make_pool(**changes)


def test_no_process_at_all_is_an_outcome(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    failed = failure_of(make_pool().run(job("answer"), 30))
    assert failed.stage == "start"
    assert failed.reason.startswith("the worker could not be started: [Errno 2]")


def test_descriptors_of_this_process_do_not_pile_up(make_pool: MakePool) -> None:
    pool = make_pool()
    answer_of(pool.run(job("answer"), 30))
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        failure_of(pool.run(job("abort"), 30))
    answer_of(pool.run(job("answer"), 30))
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_the_parent_side_does_not_import_jax() -> None:
    code = "import automesh.worker.pool, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_whoever_waits_is_told_twice_a_second_what_is_done(make_pool: MakePool) -> None:
    told: list[str] = []
    pool = make_pool(on_wait=told.append)
    assert answer_of(pool.run(job("sleep", "2.2"), 30))
    assert len(told) >= 4
    assert set(told) <= {"starting a worker and jax", "calling sleep on dp:2", ""}
    assert "calling sleep on dp:2" in told


needs_schedstat = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the system does not count waiting for cores"
)


@pytest.fixture
def busy_core() -> Iterator[int]:
    """A core that six other processes want, too."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass\n"
    # In sessions of their own: a kernel may share a core out among sessions.
    others = [
        subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(6)
    ]
    yield core
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.slow
@needs_schedstat
def test_others_on_the_cores_are_no_fault_of_a_job(make_pool: MakePool, busy_core: int) -> None:
    """Before, all compiles of a search were given up where the machine had other work."""
    pool = make_pool()
    answer_of(pool.run(job("answer"), 30))
    work = job("compute", str(busy_core), "0.2")
    assert isinstance(pool.run(work, 0.8), TimedOut)
    answer_of(pool.result_of(pool.submit(work, 0.8, patient=True)))


@pytest.mark.slow
@needs_schedstat
def test_patience_ends(make_pool: MakePool, busy_core: int) -> None:
    pool = make_pool()
    answer_of(pool.run(job("answer"), 30))
    begun = time.monotonic()
    hung = pool.result_of(pool.submit(job("sleep", "1000"), 0.5, patient=True))
    assert isinstance(hung, TimedOut)
    assert hung.limit_s == 0.5
    assert time.monotonic() - begun < 60
    answer_of(pool.run(job("answer"), 30))
    begun = time.monotonic()
    endless = pool.result_of(pool.submit(job("compute", str(busy_core), "1000"), 0.5, patient=True))
    assert isinstance(endless, TimedOut)
    assert 1.0 < time.monotonic() - begun < 120
