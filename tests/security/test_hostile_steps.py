"""What a script or a step may do to the worker that runs it: each has an outcome with a name, and
the pool goes on. No jax: what needs it is in `test_hostile_jax_steps.py`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.nouns import Entry, StepRef, VisitAnswer
from automesh.worker import pool as pool_module
from automesh.worker.messages import VisitJob
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import MEBIBYTE, SLEEP_S, job, living, surroundings

LIMIT_BYTES = 300 * MEBIBYTE
# Of what is to hang. It must suffice to load the script, on a machine that does other work.
LIMIT_S = 1.0
STAGES = {"import": "load", "build": "build", "step": "run"}
LOST = "the script closed the worker's control channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attributes:
    habit: of `tests/data/scripts/hostile.py`.
    kind: of the outcome; `answer` if the script comes through.
    says: part of the reason; of an answer part of its text.
    hint: part of the hint.
    leaves: True if processes or threads are left that must end with the worker.
    """

    habit: str
    place: str
    kind: str
    says: str = ""
    hint: str = ""
    leaves: bool = False

    def __str__(self) -> str:
        return f"{self.habit}-{self.place}"


def failed(habit: str, says: str, *places: str, hint: str = "", leaves: bool = False) -> list[Case]:
    return [
        Case(habit=habit, place=place, kind="failed", says=says, hint=hint, leaves=leaves)
        for place in places or ("step",)
    ]


def answers(habit: str, *places: str, says: str = "", leaves: bool = False) -> list[Case]:
    return [
        Case(habit=habit, place=place, kind="answer", says=says, leaves=leaves)
        for place in places or ("build",)
    ]


def late(habit: str, *places: str) -> list[Case]:
    return [Case(habit=habit, place=place, kind="timed_out") for place in places or ("step",)]


def too_large(habit: str, says: str, *places: str) -> list[Case]:
    return [
        Case(habit=habit, place=place, kind="out_of_memory", says=says)
        for place in places or ("step",)
    ]


# Those first that leave the worker as it was: it serves them all.
QUICK = [
    *answers("is_well"),
    *failed("raises", "ValueError: there is no such layer", "import", "build", "step"),
    *failed("raises_unprintable", "Odd: (its message cannot be printed)"),
    *failed("raises_what_exits_when_printed", "(its message cannot be printed)"),
    *failed("raises_what_interrupts_when_printed", "(its message cannot be printed)"),
    *failed("raises_what_is_no_text", "(its message cannot be printed)"),
    *failed("raises_endless_text", "Odd: xxx"),
    *failed("raises_surrogates", "ValueError: half a pair"),
    *failed("raises_control_characters", "ValueError: "),
    *failed("raises_a_cycle", "ValueError: round"),
    *failed("raises_a_chain", "ValueError: number 2999"),
    *failed("raises_a_group", "ExceptionGroup: several"),
    *failed("raises_a_deep_group", ""),
    *failed("raises_stop_iteration", "StopIteration: now", "build", "step"),
    *failed("raises_os_error", "No space left on device", "build"),
    *failed("recurses", "RecursionError: maximum recursion depth", "import", "step"),
    *failed("reads_its_input", "EOFError", "import"),
    *failed("sets_a_breakpoint", "BdbQuit"),
    *failed("prints_surrogates", "UnicodeEncodeError"),
    *failed("exhausts_descriptors", "Too many open files"),
    *failed("gives_nothing", "the step raised KeyError: 'gone'"),
    *failed("gives_an_object", "the step raised TypeError: float()"),
    *failed("gives_a_huge_integer", "the step raised OverflowError"),
    *failed("gives_a_liar", ""),
    *answers("gives_surrogates", "step"),
    *answers("gives_nan", "step"),
    *answers("is_interrupted", "import", "build", "step"),
    *answers("ignores_its_children", "step"),
    *answers("leaves_an_alarm", "step"),
    *answers("thread_exits", "step"),
    *answers("thread_raises", "step"),
    *answers("fork_returns"),
    *answers("fork_raises"),
    *answers("fork_exits"),
    *answers("floods", "step"),
    *answers("floods_one_line", "step"),
    *answers("writes_bytes", "step"),
    *answers("lowers_the_recursion_limit", "step"),
    *answers("masks_all_permissions"),
    *answers("deletes_itself", "import", "step"),
    *answers("overwrites_itself", "import"),
    *answers("changes_to_no_folder"),
    *answers("stops_collecting"),
    *answers("replaces_print", "import"),
    *answers("hangs_at_exit"),
]
# The worker is spoilt by these; it may go on, but another serves the next case.
SPOILT = [
    *answers("thread_outlives", leaves=True),
    *answers("starts_many_threads", leaves=True),
    *answers("leaves_copies", leaves=True),
    *answers("forks_a_tree", leaves=True),
    *answers("leaves_a_program", "import", "step", leaves=True),
    *answers("leaves_a_daemon", "import", "step", leaves=True),
    *answers("leaves_a_deaf_child", leaves=True),
    *answers("leaves_a_stopped_child", leaves=True),
    *answers("leaves_multiprocessing", leaves=True),
    *answers("leaves_zombies", leaves=True),
    *answers("removes_its_streams", leaves=True),
    *answers("replaces_its_streams", leaves=True),
    *answers("closes_its_streams", leaves=True),
    *answers("traps_its_streams", leaves=True),
    *answers("clears_the_environment", leaves=True),
    *answers("removes_the_environment", leaves=True),
    *answers("limits_files", leaves=True),
    *answers("replaces_clocks", "import", "step", leaves=True),
    *answers("replaces_exit", "import", leaves=True),
    *answers("replaces_json", "step", leaves=True),
    *answers("replaces_os", "step", leaves=True),
    *answers("replaces_signals", "step", leaves=True),
    *answers("replaces_sockets", "step", leaves=True),
    *answers("breaks_the_path", leaves=True),
    *answers("clears_modules", "step", leaves=True),
    *answers("hides_modules", "step", leaves=True),
    *answers("hooks_imports", "step", leaves=True),
    *answers("collects_loudly", leaves=True),
    *failed("warns_loudly", "UserWarning: as an error", leaves=True),
    *failed("raises_and_closes_the_streams", "ValueError: unheard", leaves=True),
    *failed("removes_its_log", "ValueError: the log is gone", leaves=True),
    *failed("traces", "RuntimeError: replaced by the script", "import", leaves=True),
    *failed("profiles", "RuntimeError: replaced by the script", "import", leaves=True),
    *failed("replaces_len", "replaced by the script", hint="`isinstance`, `len`", leaves=True),
    *answers("replaces_exceptions", "import", leaves=True),
    *failed("clears_builtins", "NameError", hint="builtins", leaves=True),
    *failed("patches_the_worker", "cannot be described", leaves=True),
]
# These end the worker, or have it ended.
ENDS = [
    *failed("exits", "the script called sys.exit(0)", "import", "build", "step"),
    *failed("exits_with_text", "the script called sys.exit('the batch is bad')"),
    *failed("exits_unprintably", "the script called sys.exit(Unprintable(...))"),
    *failed("exits_by_signal_handler", "the script called sys.exit(7)"),
    *failed("gives_what_exits", "the script called sys.exit('from float')"),
    *failed("raises_base", "Stop: at once", "import", "step"),
    *failed("raises_keyboard_interrupt", "KeyboardInterrupt", "import"),
    *failed("raises_generator_exit", "GeneratorExit: now"),
    *failed("raises_asyncio_cancelled", "CancelledError: now"),
    *failed("raises_nameless", "cannot be described"),
    *failed("hard_exits", "the worker exited with code 0 while"),
    *failed("hard_exits_with_code", "the worker exited with code 3 while", "import"),
    *failed("hard_exits_in_thread", "the worker exited with code 5 while"),
    *failed("segfaults", "the worker was killed by SIGSEGV while"),
    *failed("segfaults_unheard", "the worker was killed by SIGSEGV while"),
    *failed("aborts", "the worker was killed by SIGABRT while", "import"),
    *failed("aborts_in_thread", "the worker was killed by SIGABRT while"),
    *failed("touches_a_truncated_mapping", "the worker was killed by SIGBUS while"),
    *failed("sends_sigterm", "the worker was killed by SIGTERM while"),
    *failed("sends_sighup", "the worker was killed by SIGHUP while"),
    *failed("sends_sigint", "the worker was killed by SIGINT while"),
    *failed("sends_sigfpe", "the worker was killed by SIGFPE while"),
    *failed("sends_sigill", "the worker was killed by SIGILL while"),
    *failed("breaks_a_pipe", "the worker was killed by SIGPIPE while"),
    *failed("spends_its_processor_time", "the worker was killed by SIGXCPU while"),
    *failed("sets_an_alarm", "the worker was killed by SIGALRM while"),
    *failed("kills_itself", "the worker was killed by SIGKILL while"),
    *failed("kills_its_group", "the worker was lost while"),
    *failed("kills_its_guardian", "the worker was lost while"),
    *failed("kills_its_deputy", "the worker was lost while"),
    *failed("leaves_a_daemon_and_crashes", "the worker was killed by SIGABRT while"),
    *failed("becomes_another_program", "the worker exited with code 0 while"),
    *failed("becomes_a_program_that_stays", LOST),
    *failed("closes_descriptors", LOST),
    *failed("closes_everything", LOST),
    *failed("closes_and_opens", LOST),
    *failed("replaces_the_channel", LOST),
    *failed("shuts_the_channel", LOST),
    *failed("writes_garbage_to_the_channel", "the worker's message cannot be read"),
    *failed(
        "writes_no_json_to_the_channel", "the worker's message cannot be read: not a JSON object"
    ),
    *failed("writes_an_order_to_the_channel", "the worker's message is not understood"),
    *failed("writes_a_long_message_to_the_channel", "cannot be read: a message of 68157440 bytes"),
    *too_large("raises_memory_error", "(its message cannot be printed)"),
    *too_large("allocates_at_once", "Python ran out of memory while"),
    *too_large("limits_its_memory", "Python ran out of memory while"),
    *too_large("allocates", "killed by automesh because of its host memory", "import", "step"),
    *too_large("allocates_in_children", "killed by automesh because of its host memory"),
    *too_large("recurses_without_limit", "killed by automesh because of its host memory"),
]
HANGS = [
    *late("sleeps", "import", "build", "step"),
    *late("spins"),
    *late("holds_the_gil"),
    *late("deadlocks"),
    *late("waits_for_a_queue"),
    *late("waits_for_a_pipe"),
    *late("waits_for_a_child"),
    *late("runs_an_event_loop"),
    *late("backtracks"),
    *late("raises_to_a_power"),
    *late("blocks_all_signals"),
    *late("starves_the_main_thread"),
    *late("stops_itself"),
    *late("stops_its_guardian"),
    *late("raises_what_hangs_when_printed"),
]
# A new process takes most of the time of a case. CI has it for one of each kind, where
# `tests/worker` has none like it.
IN_CI = {
    *("exits-build", "exits_unprintably-step", "raises_base-step", "raises_nameless-step"),
    *("kills_its_guardian-step", "leaves_a_daemon_and_crashes-step", "closes_everything-step"),
    *("becomes_a_program_that_stays-step", "recurses_without_limit-step"),
    *("raises_memory_error-step", "stops_itself-step", "stops_its_guardian-step"),
    *("starves_the_main_thread-step", "raises_what_hangs_when_printed-step"),
    *("leaves_copies-build", "leaves_a_deaf_child-build", "traps_its_streams-build"),
    *("replaces_clocks-step", "replaces_exit-import", "replaces_json-step", "replaces_os-step"),
    *("traces-import", "replaces_len-step", "clears_builtins-step", "patches_the_worker-step"),
    *("clears_modules-step", "replaces_exceptions-import", "hides_modules-step"),
}


def cases() -> Iterator[object]:
    for case in QUICK:
        yield pytest.param(case, id=str(case))
    for case in (*SPOILT, *ENDS, *HANGS):
        marks = () if str(case) in IN_CI else (pytest.mark.long,)
        yield pytest.param(case, id=str(case), marks=marks)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path_factory.mktemp("logs"),
        memory_limit_bytes=LIMIT_BYTES,
        handler="tests.support.handlers.hostile",
    ) as pool:
        yield pool
    assert living() == []


def visit(script: Path, case: Case) -> VisitJob:
    argv = (case.habit, case.place, SLEEP_S)
    entry = Entry(kind="script", location=str(script), function="build", argv=argv)
    return VisitJob(
        step=StepRef(entry=entry),
        plan=job("build").plan,
        cache_dir="",
        steps=1,
        samples=1,
        loss_steps=1,
    )


def strangers(pool: Pool) -> list[psutil.Process]:
    """Processes below this one that are no worker, and none of its two guards."""
    ours: set[int] = set()
    for worker in pool._workers:
        deputy = worker.process._deputy.pid
        ours.add(deputy)
        try:
            guardian = min(psutil.Process(deputy).children(), key=psutil.Process.create_time)
            ours.add(guardian.pid)
            ours.add(min(guardian.children(), key=psutil.Process.create_time).pid)
        except (psutil.Error, ValueError):  # It is just ending.
            continue
    return [
        one
        for one in psutil.Process().children(recursive=True)
        if one.pid not in ours and _is_alive(one)
    ]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_there_are_enough_cases() -> None:
    all_cases = [*QUICK, *SPOILT, *ENDS, *HANGS]
    assert len({str(case) for case in all_cases}) == len(all_cases) >= 90
    assert {str(case) for case in all_cases} >= IN_CI


@pytest.mark.slow_after(24)
@pytest.mark.parametrize("case", list(cases()))
def test_a_hostile_script_has_an_outcome_with_a_name(
    pool: Pool, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_SEVERED_S", 0.5)
    script = shutil.copy(SCRIPTS / "hostile.py", tmp_path / "hostile.py")
    try:
        judge(pool, case, Path(script))
    except BaseException:  # One case that fails must not make those after it fail.
        pool.recycle()
        raise


def judge(pool: Pool, case: Case, script: Path) -> None:
    begun = time.monotonic()
    result = pool.run(visit(script, case), LIMIT_S if case.kind == "timed_out" else 30)
    assert time.monotonic() - begun < 120
    match result:
        case VisitAnswer():
            assert case.kind == "answer", result
        case Failed():
            assert (result.kind, result.stage) == (case.kind, STAGES[case.place]), result
            assert case.says in result.reason, result
            assert case.hint in result.hint, result
            assert len(result.reason) < 400
            assert "\n" not in result.reason
        case TimedOut():
            assert (result.kind, result.stage) == (case.kind, STAGES[case.place]), result
            assert result.limit_s == LIMIT_S
        case OutOfMemory():
            assert (result.kind, result.stage) == (case.kind, STAGES[case.place]), result
            assert case.says in result.detail, result
        case _:
            pytest.fail(f"no outcome: {result}")
    if case.leaves:
        pool.recycle()
    deadline = time.monotonic() + 300
    while left := strangers(pool):
        assert time.monotonic() < deadline, left
        pool.wait(0.05)
        time.sleep(0.02)
    # The next job is none of this one's business, in the same process or in another.
    well = Case(habit="is_well", place="step", kind="answer")
    after = pool.run(visit(SCRIPTS / "hostile.py", well), 30)
    assert isinstance(after, VisitAnswer), after
    assert after.losses == (0.5,)
