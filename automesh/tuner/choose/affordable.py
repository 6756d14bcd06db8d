"""What a budget buys where a process takes long to get to the step (pure functions)."""

from __future__ import annotations

import math
from pathlib import Path

from automesh.program.nouns import Entry
from automesh.units import format_wait

# Starts of a process one after the other that a confirmed rule needs: one to estimate, one to
# compile, one for first visits and the race, and three fresh processes.
STARTS_OF_RULE = 6
# Of a script whose step is carried only the winner's mesh is left, on which it is run once more.
STARTS_OF_CARRIED = 1
WORK_S = 20.0  # beside starts: compiles, rounds of the race
_SLOW_S = 5.0  # of a start; below it the search itself takes longer


def rule_s(start_s: float, *, starts: int = STARTS_OF_RULE) -> float:
    """Seconds that a search takes until its rule is confirmed, at least.

    Args:
      start_s: what a process needs until it has the step.
      starts: how many processes are still to be started so.
    """
    return starts * start_s + WORK_S


def said_of_budget(entry: Entry, *, start_s: float, left_s: float, used_s: float) -> str:
    """What the budget cannot buy, told as soon as it is known; empty if it suffices.

    Args:
      start_s: what a process needs until it has the step, as the first one did.
      left_s: of the budget.
      used_s: of the budget, until now.
    """
    is_carried = entry.capture is not None and entry.capture.is_carried
    starts = STARTS_OF_CARRIED if is_carried else STARTS_OF_RULE
    needed_s = rule_s(start_s, starts=starts)
    if start_s < _SLOW_S or needed_s <= left_s:
        return ""
    what = "a fresh process"
    if entry.capture is not None:
        what = f"a run of {Path(entry.location).name} up to its step"
    minutes = math.ceil((used_s + 1.25 * needed_s) / 60)
    return (
        f"{what} takes {format_wait(start_s)} here: a confirmed rule needs about "
        f"{format_wait(needed_s)}; give --budget {minutes}m, or what was measured until then is "
        "ranked by the best evidence there is"
    )
