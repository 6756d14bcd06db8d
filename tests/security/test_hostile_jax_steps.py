"""What a script or a step with jax may do to the worker that runs it: each has an outcome with a
name, on the handlers of every search. What needs no jax is in `test_hostile_steps.py`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.nouns import Entry, Inspection, StepRef, VisitAnswer
from automesh.worker.messages import InspectJob, VisitJob
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import MEBIBYTE, living, surroundings

DEVICES = 2
LIMIT_S = 120.0
LATE_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attributes:
    habit: of `tests/data/scripts/hostile_jax.py`.
    kind: of the outcome; `answer` if the step is measured all the same.
    stage: of the outcome.
    says, hint: parts of the reason and of the hint.
    spoils: True if the next case needs another worker.
    """

    habit: str
    kind: str = "answer"
    stage: str = ""
    says: str = ""
    hint: str = ""
    spoils: bool = False


def failed(habit: str, stage: str, says: str, *, hint: str = "", spoils: bool = False) -> Case:
    return Case(habit=habit, kind="failed", stage=stage, says=says, hint=hint, spoils=spoils)


# One worker serves them all.
QUICK = [
    Case(habit="is_well"),
    Case(habit="deletes_itself"),
    Case(habit="clears_caches"),
    Case(habit="gives_nan"),
    Case(habit="gives_away_all"),
    failed("gives_none", "build", "`build` returned"),
    failed("gives_a_number", "build", "`build` returned"),
    failed("gives_one", "build", "`build` returned"),
    failed("gives_text", "build", "`build` returned"),
    failed("raises_in_step", "lower", "ValueError: no such layer"),
    failed("gives_a_string", "lower", "TypeError"),
    failed("gives_an_object", "lower", "TypeError"),
    Case(habit="uses_what_was_given_away"),
    failed("deletes_its_arrays", "materialize", "deleted"),
    failed("starts_with_another_shape", "materialize", ""),
    failed("advances_to_nothing", "run", "`advance` returned a NoneType"),
    failed("raises_in_advance", "run", "replaced by the script"),
    Case(habit="gives_another_shape"),
    Case(habit="gives_another_type"),
    Case(habit="gives_a_tracer_away"),
    Case(habit="is_not_jitted"),
    failed("gives_away_what_is_not_there", "build", ""),
    # The last ones of this worker.
    Case(habit="stops_clocks_in_callback"),
    Case(habit="stops_clocks", spoils=True),
    Case(habit="replaces_waiting", spoils=True),
    failed("replaces_len", "start", "replaced by the script", hint="the builtin `len`"),
]
# Each needs a worker of its own, or spoils it.
LONG = [
    Case(habit="wants_devices", spoils=True),
    Case(habit="wants_devices_by_flags", spoils=True),
    failed("starts_jax_with_others", "load", "jax with 5 devices", hint="cpu:5", spoils=True),
    failed("wants_no_platform", "start", "jax could not start on `nonsense`", spoils=True),
    failed("hides_devices", "load", "jax with 0 devices", spoils=True),
    failed("debugs_nans", "run", "", spoils=True),
    failed("disables_jit", "run", "Disable jit is not supported", spoils=True),
    Case(habit="forbids_transfers", spoils=True),
    Case(habit="enables_x64", spoils=True),
    failed("replaces_jit", "build", "replaced by the script", spoils=True),
    failed("replaces_tree", "lower", "replaced by the script", spoils=True),
    failed("replaces_isinstance", "load", "replaced by the script", hint="`isinstance`"),
    failed("replaces_collect", "materialize", "replaced by the script", spoils=True),
    failed("replaces_numpy", "lower", "replaced by the script", spoils=True),
    Case(habit="clears_backends", spoils=True),
    failed("kills_itself", "build", "the worker was killed by SIGKILL while building"),
    failed("exits_in_step", "lower", "the script called sys.exit(3)"),
    failed("exits_at_init", "materialize", "the script called sys.exit(6)"),
    # Its other devices wait for it in a collective, until XLA gives up.
    failed("raises_in_callback", "run", "the worker was killed by SIGABRT while running"),
    failed("exits_in_callback", "run", "the worker exited with code 4 while running"),
    failed("crashes_in_callback", "run", "the worker was killed by SIGABRT while running"),
    Case(habit="hangs_in_callback", kind="timed_out", stage="run"),
    Case(habit="loops_without_end", kind="timed_out", stage="run"),
    Case(habit="allocates_on_the_device", kind="out_of_memory", stage="run"),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(
        size=1,
        surroundings=surroundings(cpu_devices=DEVICES),
        log_dir=tmp_path_factory.mktemp("logs"),
        memory_limit_bytes=2000 * MEBIBYTE,
    ) as pool:
        yield pool
    assert living() == []


def step(folder: Path, habit: str) -> StepRef:
    script = shutil.copy(SCRIPTS / "hostile_jax.py", folder / "hostile_jax.py")
    entry = Entry(kind="script", location=str(script), function="build", argv=(habit,))
    return StepRef(entry=entry, axis_types=("auto",))


def visit(folder: Path, habit: str) -> VisitJob:
    return VisitJob(
        step=step(folder, habit),
        plan=Plan(axes=(MeshAxis(name="dp", ici=DEVICES),)),
        cache_dir=str(folder / "cache"),
        steps=2,
        samples=2,
        loss_steps=2,
    )


def test_there_are_enough_cases() -> None:
    assert len({case.habit for case in (*QUICK, *LONG)}) == len(QUICK) + len(LONG) >= 45


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.habit) for case in QUICK),
        *(pytest.param(case, id=case.habit, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_a_hostile_step_has_an_outcome_with_a_name(pool: Pool, case: Case, tmp_path: Path) -> None:
    limit_s = LATE_S if case.kind == "timed_out" else LIMIT_S
    result = pool.run(visit(tmp_path, case.habit), limit_s)
    if case.spoils:
        pool.recycle()
    match result:
        case VisitAnswer():
            assert case.kind == "answer", result
            # Whatever the script has made of its clocks.
            assert len(result.samples_s) == 2
            assert all(1e-7 < seconds < 60 for seconds in result.samples_s)
            assert len(result.losses) == 2
        case Failed():
            assert (result.kind, result.stage) == (case.kind, case.stage), result
            assert case.says in result.reason, result
            assert case.hint in result.hint, result
            assert "\n" not in result.reason
        case TimedOut() | OutOfMemory():
            assert (result.kind, result.stage) == (case.kind, case.stage), result
        case _:
            pytest.fail(f"no outcome: {result}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("habit", "notice"),
    [
        ("is_well", ()),
        (
            "wants_devices",
            ("the script sets `jax_num_cpu_devices` to 5; the target's 2 devices are searched",),
        ),
        pytest.param(
            "wants_devices_by_flags",
            (
                "the script sets --xla_force_host_platform_device_count in XLA_FLAGS; the target's "
                "2 devices are searched",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_script_does_not_change_the_size_of_the_target(
    pool: Pool, habit: str, notice: tuple[str, ...], tmp_path: Path
) -> None:
    """Before, the search for `cpu:2` went on with five devices, and wrote a rule for `cpu-2`."""
    pool.recycle()
    seen = pool.run(InspectJob(step=step(tmp_path, habit), axis_names=("dp",)), LIMIT_S)
    assert isinstance(seen, Inspection), seen
    assert len(seen.devices) == DEVICES
    assert seen.notices == notice


def test_an_interruption_of_one_worker_alone_while_it_compiles_is_passed_over(
    pool: Pool, tmp_path: Path
) -> None:
    """Before, the plan had failed: `compiling raised KeyboardInterrupt`."""
    sent: list[str] = []

    def interrupt(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["event"] == "stage" and event["stage"] in ("load", "compile", "run"):
            (worker,) = pool._workers
            (guardian,) = psutil.Process(worker.process._deputy.pid).children()
            for child in guardian.children():
                os.kill(child.pid, signal.SIGINT)
            sent.append(event["stage"])
        return {"go": True} if event.get("reply") else None

    result = pool.run(visit(tmp_path, "is_well"), LIMIT_S, interrupt)
    assert isinstance(result, VisitAnswer), result
    assert sent == ["load", "compile", "run"]
