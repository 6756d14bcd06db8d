"""What the compile rung asks of workers, and what their answers mean: for devices that are here."""

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
    """Compiles for certain devices."""

    def job(self, plan: Plan) -> CompileJob:
        """The message that asks a worker for one compile."""
        ...

    def outcome(self, plan: Plan, answer: CompileAnswer) -> Outcome:
        """What a compile says of its plan."""
        ...

    def keeps(self, known: Compiled) -> bool:
        """Whether a finished compile can be taken over by other plans with the same program."""
        ...

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """What a finished compile of the same program says of another plan, or of this one now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilingHere:
    """Compiles for attached or virtual devices.

    Attributes:
      player: gives a step's time from the schedule; None: it comes from what the program counts.
      cache_dir: as of `SearchContext`.
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
        # The chip table may have changed since a stale trial was written, and its replay may be of
        # another plan, or at other speeds.
        counted = predicted(replace(known, replay=None), self.preparation.chip)
        return self._played(plan, counted)

    def _played(self, plan: Plan, compiled: Compiled) -> Compiled:
        """With the time by its schedule, if that is there and can be played: the program will be
        measured in any case."""
        if self.player is None or not compiled.stored:
            return compiled
        try:
            played = self.player.replayed(plan, compiled)
        except UsageError:  # Others make room in the store, too.
            return compiled
        return played if isinstance(played, Compiled) else compiled


def outcome_of(preparation: Preparation, answer: CompileAnswer) -> Outcome:
    """What a worker said, with a time from what its programs do; or that it does not fit."""
    device_memory, needed_bytes = preparation.device_memory, answer.memory.peak_bytes
    # Compilers for GPUs refuse nothing. The reserve is judged when the outcome is read: see
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
    """The outcome with the time of a step from what its programs do."""
    if compiled.pipeline is not None:
        return predict_pipeline(compiled, compiled.pipeline, chip)
    return replace(compiled, step_s=predict(compiled.counts, chip).step_s)


def compile_job(preparation: Preparation, plan: Plan, cache_dir: Path | None) -> CompileJob:
    """A compile for the devices that the worker has; `cache_dir` as of `SearchContext`."""
    step = preparation.step
    return CompileJob(
        step=replace(step, absent=None),
        plan=plan,
        cache_dir=str(cache_dir or ""),
    )


# Compiles for devices that are not here: at low effort for a verdict, at default effort for a
# schedule.


@dataclass(slots=True, kw_only=True)
class CompilingAhead:
    """Compiles for absent devices; see `Compiling`.

    Attributes:
      player: gives a step's time from the schedule; None at low effort, whose schedule is none that
        would run.
      asked: what user code asked about the devices, in words, each once.
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
        """See `Compiling`: what was removed from the store must be compiled again."""
        needed = {known.stored}
        if known.pipeline is not None:
            needed = {program.stored for program in known.pipeline.programs}
        return self.player is None or all(self.store.find(one) is not None for one in needed)

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """See `Compiling`: the same program has other names for its axes on another plan."""
        return self._played(plan, known)

    def _played(self, plan: Plan, compiled: Compiled) -> Outcome:
        return self.player.replayed(plan, compiled) if self.player else compiled
