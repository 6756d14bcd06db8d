"""Which plan is first while estimates are still being made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated
from automesh.report.progress import Progress
from automesh.report.words import count
from automesh.tuner.choose.ranking import hardly_fits
from automesh.units import format_seconds

# Plans of one set of active axes that are priced to say who leads: all of them are priced later.
MOST_PRICED = 256


@dataclass(slots=True, kw_only=True)
class Leader:
    """The plan with the best estimate so far, told after every set of active axes.

    Attributes:
      device_memory_bytes: what one device can hold; 0 where nobody says.
    """

    progress: Progress
    device_memory_bytes: int = 0
    _best: tuple[tuple[bool, float, str], ...] = field(init=False, default=())
    _priced: int = field(init=False, default=0)

    def note(self, found: Sequence[tuple[Plan, Estimated]]) -> None:
        """Takes the estimates of a set of active axes, and says who is first now."""
        self._priced += len(found)
        for plan, estimated in found:
            is_large = hardly_fits(estimated, self.device_memory_bytes)
            mine = (is_large, estimated.step_s, str(plan))
            if not self._best or mine < self._best[0]:
                self._best = (mine,)
        if self._best:
            is_large, step_s, name = self._best[0]
            size = ", and too large for a device" if is_large else ""
            self.progress.leader(
                f"{name} first of {count(self._priced, 'plan')} so far, "
                f"{format_seconds(step_s)} estimated{size}"
            )
