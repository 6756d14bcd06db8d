"""Compiled programs from the store, played on the links of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automesh.cost.replay import replay
from automesh.cost.replay_timeline import Timeline
from automesh.errors import AutomeshError, UsageError
from automesh.hardware.fabric import Fabric, Layouts
from automesh.hardware.speeds import Speeds
from automesh.hlo import read_module
from automesh.hlo.schedule import read_schedule
from automesh.hlo.store import FOLDER_VARIABLE, ModuleStore
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failed, Outcome, Replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays scheduled programs.

    Attributes:
      store: where they are.
      layouts: of the ICI shapes of all plans that are asked for.
    """

    store: ModuleStore
    fabric: Fabric
    layouts: Layouts
    speeds: Speeds

    def replayed(self, plan: Plan, compiled: Compiled) -> Outcome:
        """What the compiler said, with the time of a step from its schedule.

        Raises:
          UsageError: the program is not in the store.
        """
        played = self.play(plan, compiled)
        if isinstance(played, Failed):
            return played
        return replace(compiled, replay=played[0], step_s=played[0].step_s)

    def play(self, plan: Plan, compiled: Compiled) -> tuple[Replayed, Timeline] | Failed:
        """Plays the program of a plan; `Failed` if its schedule cannot be read.

        Raises:
          UsageError: the program is not in the store.
        """
        stored = self.store.find(compiled.stored) if compiled.stored else None
        if stored is None or not stored.module:
            raise UsageError(
                f"the compiled program of {plan} is not in `{self.store.folder}`, where it should "
                "have been kept",
                hint=f"make room on that disk, or name another folder with ${FOLDER_VARIABLE}, and "
                "run the same command again",
            )
        try:
            dcn = [axis.dcn for axis in plan.axes]
            module = read_module(stored.module)
            schedule = read_schedule(module, list(plan.sizes.items()), dcn)
            return replay(
                schedule,
                axes=plan.axes,
                fabric=self.fabric,
                layouts=self.layouts,
                speeds=self.speeds,
            )
        except (AutomeshError, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason = f"the compiled program cannot be replayed: {said}"
            return Failed(stage="replay", reason=reason)
