"""Compiles for devices that are not here: at low effort for a verdict, at default effort for a
schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from automesh.hardware.absent import Elsewhere
from automesh.hlo.store import ModuleStore
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Effort, Outcome
from automesh.program.nouns import CompileAnswer
from automesh.tuner.compile.attached import compile_job, compiled_of, predicted
from automesh.tuner.compile.replay import Player
from automesh.tuner.preparation import Preparation
from automesh.worker.messages import CompileJob


@dataclass(slots=True, kw_only=True)
class CompilingAhead:
    """Compiles for absent devices; see `Compiling`.

    Attributes:
      player: gives a step's time from the schedule; None at low effort, whose schedule is none that
        would run.
      asked: what user code asked about the devices, in words, each once.
    """

    preparation: Preparation
    elsewhere: Elsewhere
    effort: Effort
    store: ModuleStore
    player: Player | None
    asked: dict[str, None] = field(default_factory=dict[str, None])

    def job(self, plan: Plan) -> CompileJob:
        """See `Compiling`."""
        return replace(
            compile_job(self.preparation, plan),
            elsewhere=self.elsewhere,
            effort=self.effort,
            store_dir=str(self.store.folder),
        )

    def outcome(self, plan: Plan, answer: CompileAnswer) -> Outcome:
        """See `Compiling`."""
        self.asked |= dict.fromkeys(answer.asked)
        room = self.preparation.room
        # Compilers for GPUs refuse nothing. The reserve is judged when the outcome is read.
        if room.limit_bytes and answer.memory.peak_bytes > room.limit_bytes:
            return replace(room, reserve_bytes=0).refusal(answer.memory.peak_bytes)
        compiled = predicted(compiled_of(answer), self.preparation.chip)
        return self._played(plan, compiled)

    def keeps(self, known: Compiled) -> bool:
        """See `Compiling`: what was removed from the store must be compiled again."""
        needed = {known.stored}
        if known.pipeline is not None:
            needed = {one.stored for one in known.pipeline.programs}
        return self.player is None or all(self.store.find(one) is not None for one in needed)

    def again(self, plan: Plan, known: Compiled) -> Outcome:
        """See `Compiling`: the same program has other names for its axes on another plan."""
        return self._played(plan, known)

    def _played(self, plan: Plan, compiled: Compiled) -> Outcome:
        return self.player.replayed(plan, compiled) if self.player else compiled
