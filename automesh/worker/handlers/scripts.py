"""Loads the user's script in a worker, once, and builds it on the devices of a job (jax)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import jax

from automesh.errors import UsageError
from automesh.hardware.absent import AbsentDevices
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed
from automesh.package import is_users_file
from automesh.partition.haliax_support import restore_removed_names
from automesh.program.absent.client import devices_of
from automesh.program.absent.device_queries import (
    Answers,
    answering,
    attached,
    explaining_real_arrays,
    own,
)
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.distributed import is_joined, join
from automesh.program.notes import note
from automesh.program.nouns import Entry
from automesh.program.refused import StepRefused
from automesh.program.script.build import Built, build_on, check_facts, read_facts
from automesh.program.script.load import load_entry
from automesh.program.script.signature import Signature, check_knobs, check_mapping, read_signature
from automesh.texts.exceptions import in_one_line
from automesh.worker.blame import OutcomeError
from automesh.worker.handlers.device_count import check_device_count, hold_device_count
from automesh.worker.handlers.stages import Emit, StageReporter
from automesh.worker.messages import (
    BuildJob,
    CompileJob,
    PropagateJob,
    SummarizeJob,
    TraceJob,
    VisitJob,
)
from automesh.worker.place import place_in

_PLACE = place_in(os.environ)  # Read before any user code runs.
_Job = TypeVar("_Job", BuildJob, PropagateJob)
_Answer = TypeVar("_Answer")
_NO_BACKEND = "Unable to initialize backend"  # jax's words, in jax/_src/xla_bridge.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A loaded script.

    Attributes:
      absent: the absent devices that the script sees; None if it sees those of this process.
      asked: what the script asked about the devices while it was loaded, in words.
      modules: names of the user's modules that it imported.
      notices: messages for the user about the script.
    """

    build: Callable[..., Any]
    signature: Signature
    absent: AbsentDevices | None
    asked: tuple[str, ...]
    modules: tuple[str, ...]
    notices: tuple[str, ...] = ()


@dataclass(slots=True)
class Scripts:
    """The loaded scripts of a worker, by their entries.

    Attributes:
      took_s: seconds that loading took, with the start of jax.
    """

    loaded: dict[Entry, Script] = field(default_factory=dict[Entry, Script])
    took_s: float = 0.0

    def load(
        self,
        entry: Entry,
        stages: StageReporter,
        one: AbsentDevices | None = None,
        answers: Answers | None = None,
    ) -> Script:
        """Returns a script, and loads it first if necessary.

        A script may look at devices when it is loaded. So for other devices it is loaded again,
        with its own modules.

        Args:
          one: the absent devices that the script sees, in which case `answers` are active; None if
            it sees those of this process.

        Raises:
          OutcomeError: jax cannot start.
          UsageError: as `load_entry` and `read_signature`.
        """
        stages.enter("load")
        if (known := self.loaded.get(entry)) is not None:
            if known.absent == one:
                return known
            _forget(self.loaded.pop(entry))
        before, said = set(sys.modules), list[str]()
        begun_s = perf_counter()
        try:
            build = load_entry(entry)
            said += hold_device_count()
        except Exception as error:
            if _NO_BACKEND in str(
                error
            ):  # The script is not the cause; it only asked for devices first.
                start_jax(stages)
                stages.enter("load")
            raise
        signature = read_signature(build)
        # After the load: a script may configure jax, which must happen before jax finds its
        # devices.
        start_jax(stages)
        try:
            check_device_count()
        except UsageError:
            stages.enter("load")  # The script is the cause, not jax.
            raise
        self.took_s += perf_counter() - begun_s
        self.loaded[entry] = script = Script(
            build=build,
            notices=tuple(said),
            signature=signature,
            absent=one,
            asked=answers.asked if answers is not None else (),
            modules=tuple(name for name in sys.modules if name not in before and _is_users(name)),
        )
        return script


def join_gang(emit: Emit) -> None:
    """Joins the other processes of a gang before the first job, as a part of the start.

    Raises:
      RuntimeError: the others did not join.
    """
    if _PLACE is not None and not is_joined():
        emit({"event": "stage", "stage": "start"})
        join(_PLACE.coordinator, rank=_PLACE.rank, count=_PLACE.count, host=_PLACE.host)


def start_jax(stages: StageReporter) -> None:
    """Makes jax find its devices.

    Raises:
      OutcomeError: jax cannot start; neither the script nor a plan is the cause.
    """
    stages.enter("start")
    restore_removed_names()
    try:
        attached()
    # Plugins may raise any exception.
    except Exception as error:
        config: Any = jax.config
        raise OutcomeError(
            Failed(
                stage="start",
                reason=f"jax could not start on `{config.jax_platforms}`: {in_one_line(error)}",
                hint="check JAX_PLATFORMS, or search virtual devices: `--target cpu:8`",
            )
        ) from error


def build_plan(
    job: BuildJob | CompileJob | SummarizeJob | TraceJob | VisitJob | PropagateJob,
    plan: Plan,
    script: Script,
    devices: Sequence[Any] | None = None,
) -> Built:
    """Calls `build` for a plan.

    Args:
      devices: the devices of the mesh; by default those of this process.

    Raises:
      UsageError: `build` does not take the plan's knobs or its mapping, or its facts depend on the
        mesh.
      Exception: whatever `build` raises.
    """
    check_knobs(script.signature, plan.knobs, name=job.step.entry.function)
    check_mapping(script.signature, plan.mapping, name=job.step.entry.function)
    here = attached() if devices is None else devices
    if plan.num_devices < len(here) and plan.num_devices <= len(own()):
        # For the mesh of one device, with which others are compared, each process of a gang uses a
        # device of its own.
        here = own()
    built = build_on(
        script.build,
        plan.axes,
        axis_types=job.step.axis_types,
        mapping=plan.mapping,
        knobs=plan.knobs,
        devices=here,
    )
    defaults = dict(script.signature.knobs)
    # Facts may depend on knobs, and were read with the knobs' defaults.
    if all(name in defaults and defaults[name] == value for name, value in plan.knobs):
        check_facts(job.step.facts, read_facts(built.workload), mesh=plan.mesh)
    return built


@contextmanager
def showing_devices(
    one: AbsentDevices | None, function: str, *, as_one: bool = False
) -> Generator[Answers | None]:
    """Shows other devices to user code while the body runs on those of this process.

    Meshes that user code makes itself consist of this process's devices, as does the mesh that it
    gets.

    Args:
      function: name of the user's function, for errors.
      as_one: True for a captured script, which sees one process with all devices.
    """
    if one is None:
        yield None
        return
    with (
        explaining_real_arrays(function),
        answering(one, lambda: _shown(one), in_meshes=False, as_one=as_one) as answers,
    ):
        yield answers


def with_or_without_shown_devices(
    job: _Job, work: Callable[[_Job], _Answer]
) -> tuple[_Answer, str]:
    """Does a job with the target's devices shown to user code; if it fails, does it again without.

    The second try is for attached accelerators only: there `build` may run kernels that only they
    can run, as it did in the inspection, but gets virtual devices here. For absent devices `build`
    must not run anything.

    Returns:
      The answer, and a notice for the user, empty if the first try succeeded.

    Raises:
      Exception: whatever the second try raises.
    """
    one = job.step.absent
    if one is None or not one.is_attached:
        return work(job), ""
    try:
        return work(job), ""
    except Exception as error:  # noqa: BLE001 - whatever user code raises
        traceback.print_exc()
        why = (
            f"the step could not be built as for {one.device_kind}, only with the kernels that it "
            f"has for CPUs: {in_one_line(error)}"
        )
    answer = work(replace(job, step=replace(job.step, absent=None)))
    note(why)
    return answer, why


@cache
def _shown(one: AbsentDevices) -> Sequence[Any]:
    """Returns the devices of a topology, or stand-ins if no compile-only client provides them."""
    if one.is_attached:
        return fake_devices(one)
    try:
        return devices_of(one)
    except StepRefused as refused:
        reason = refused.outcome.reason if isinstance(refused.outcome, Failed) else str(refused)
        note(f"{reason}: user code that asks for devices gets stand-ins")
        return fake_devices(one)


def _forget(script: Script) -> None:
    for name in script.modules:
        sys.modules.pop(name, None)


def _is_users(name: str) -> bool:
    """Whether a module is the user's own code: not installed, and not of automesh."""
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and is_users_file(str(Path(file).resolve()))


def is_wanted(fingerprint: str, emit: Emit) -> tuple[bool, float]:
    """Tells the parent which program was lowered, and asks whether to compile it.

    Returns:
      The answer, and the seconds that the wait for it took.
    """
    begun = perf_counter()
    reply = emit({"event": "lowered", "fingerprint": fingerprint, "reply": True})
    return bool(reply["go"]), perf_counter() - begun
