"""The jobs of the compile rung and the outcomes that their answers mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from automesh.cost.roofline import predict
from automesh.errors import UsageError
from automesh.hardware import Chip
from automesh.hlo.store import ModuleStore
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Effort, Outcome
from automesh.program.nouns import CompileAnswer
from automesh.tuner.compile.pipelines import predict_pipeline
from automesh.tuner.compile.replay import Player
from automesh.tuner.preparation import Preparation
from automesh.worker.messages import CompileJob


class Compiling(Protocol):
    """Makes compile jobs for one kind of devices, and outcomes from their answers."""

    def job(self, plan: Plan) -> CompileJob:
        """Makes the job that compiles a plan."""
        ...

    def outcome(self, plan: Plan, answer: CompileAnswer) -> Outcome:
        """Returns the outcome of a plan, from the answer of its compile."""
        ...

    def keeps(self, known: Compiled) -> bool:
        """Whether other plans with the same program can use a finished compile."""
        ...

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """Returns the outcome of a plan, from a finished compile of the same program for it or
        another plan."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilingHere:
    """Makes compile jobs for attached or virtual devices.

    Attributes:
      player: predicts a step's time from the schedule; None: it is predicted from the work of the
        program.
      cache_dir: as for `SearchContext`.
    """

    preparation: Preparation
    player: Player | None = None
    cache_dir: Path | None = None

    def job(self, plan: Plan) -> CompileJob:
        """See `Compiling`."""
        job = compile_job(self.preparation, plan, self.cache_dir)
        return replace(job, store_dir=str(self.player.store.folder)) if self.player else job

    def outcome(self, plan: Plan, answer: CompileAnswer) -> Outcome:
        """See `Compiling`."""
        outcome = outcome_of(self.preparation, answer)
        return self._played(plan, outcome) if isinstance(outcome, Compiled) else outcome

    def keeps(self, known: Compiled) -> bool:
        """See `Compiling`."""
        del known
        return True

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """See `Compiling`."""
        # The chip table may have changed since the compile was stored, and its replay may belong to
        # another plan or other speeds.
        counted = predicted(replace(known, replay=None), self.preparation.chip)
        return self._played(plan, counted)

    def _played(self, plan: Plan, compiled: Compiled) -> Compiled:
        """Adds the time from its schedule, if the program is in the store and can be replayed. If
        not, the program is still measured."""
        if self.player is None or not compiled.stored:
            return compiled
        try:
            played = self.player.replayed(plan, compiled)
        except UsageError:  # Another search has removed it from the store.
            return compiled
        return played if isinstance(played, Compiled) else compiled


def outcome_of(preparation: Preparation, answer: CompileAnswer) -> Outcome:
    """Turns a worker's answer into an outcome with a predicted time, or into `OutOfMemory`."""
    device_memory, needed_bytes = preparation.device_memory, answer.memory.peak_bytes
    # Compilers for GPUs refuse no program. The reserve is judged when the outcome is read: see
    # `DeviceMemory`.
    if device_memory.limit_bytes and needed_bytes > device_memory.limit_bytes:
        return replace(device_memory, reserve_bytes=0).refusal(needed_bytes)
    compiled = Compiled(
        fingerprint=answer.fingerprint,
        memory=answer.memory,
        counts=answer.counts,
        step_s=0.0,
        compile_s=answer.compile_s,
        effort=answer.effort,
        stored=answer.stored,
        pipeline=answer.pipeline,
    )
    return predicted(compiled, preparation.chip)


def predicted(compiled: Compiled, chip: Chip) -> Compiled:
    """Adds a step time that is predicted from the work of its programs."""
    if compiled.pipeline is not None:
        return predict_pipeline(compiled, compiled.pipeline, chip)
    return replace(compiled, step_s=predict(compiled.counts, chip).step_s)


def compile_job(preparation: Preparation, plan: Plan, cache_dir: Path | None) -> CompileJob:
    """Returns a job that compiles for the devices of the worker; `cache_dir` as for
    `SearchContext`."""
    step = preparation.step
    return CompileJob(
        step=replace(step, absent=None),
        plan=plan,
        cache_dir=str(cache_dir or ""),
    )


# Compiles for absent devices: at low effort to check whether a plan fits, at default effort for a
# schedule.


@dataclass(slots=True, kw_only=True)
class CompilingAhead:
    """Makes compile jobs for absent devices; see `Compiling`.

    Attributes:
      player: replays the schedule for the step time; None at low effort, whose schedule would not
        run.
      asked: collects what user code asked about the devices, in words, each once.
    """

    preparation: Preparation
    effort: Effort
    store: ModuleStore
    player: Player | None
    asked: dict[str, None] = field(default_factory=dict[str, None])

    def job(self, plan: Plan) -> CompileJob:
        """See `Compiling`."""
        return replace(
            compile_job(self.preparation, plan, None),
            step=self.preparation.step,
            effort=self.effort,
            store_dir=str(self.store.folder),
        )

    def outcome(self, plan: Plan, answer: CompileAnswer) -> Outcome:
        """See `Compiling`."""
        self.asked |= dict.fromkeys(answer.asked)
        outcome = outcome_of(self.preparation, answer)
        return self._played(plan, outcome) if isinstance(outcome, Compiled) else outcome

    def keeps(self, known: Compiled) -> bool:
        """See `Compiling`; False for a program that is no longer in the store."""
        needed = {known.stored}
        if known.pipeline is not None:
            needed = {program.stored for program in known.pipeline.programs}
        return self.player is None or all(self.store.find(one) is not None for one in needed)

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """See `Compiling`; the axes of the program may have other names on another plan."""
        return self._played(plan, known)

    def _played(self, plan: Plan, compiled: Compiled) -> Outcome:
        return self.player.replayed(plan, compiled) if self.player else compiled
