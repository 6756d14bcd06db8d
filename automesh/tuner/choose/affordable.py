"""Checks whether a budget suffices if a process takes long to reach the step (pure functions)."""

from __future__ import annotations

import math
from pathlib import Path

from automesh.program.nouns import Entry
from automesh.report.words import count
from automesh.units import format_wait

# Consecutive starts of a process that a confirmed rule needs: one to estimate, one to compile, one
# for first visits and the race, and three fresh processes.
STARTS_OF_RULE = 6
# If the step of a script is carried, the script itself runs only once more, on the winner's mesh.
STARTS_OF_CARRIED = 1
WORK_S = 20.0  # besides starts: compiles, rounds of the race
_SLOW_S = 5.0  # of a start; faster starts do not limit a search


def rule_s(start_s: float, *, starts: int = STARTS_OF_RULE) -> float:
    """Returns the least seconds that a search takes until its rule is confirmed.

    Args:
      start_s: seconds of a process until it has the step.
      starts: number of such processes that are still to start.
    """
    return starts * start_s + WORK_S


def short_budget_notice(entry: Entry, *, start_s: float, left_s: float, used_s: float) -> str:
    """Returns a notice that the budget is too short for a confirmed rule; empty if it suffices.

    Args:
      start_s: seconds of a process until it has the step, as measured in the first one.
      left_s: seconds of the budget that are left.
      used_s: seconds of the budget that are used.
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


def short_compiles_notice(
    compile_s: float, *, at_once: int, left: int, left_s: float, used_s: float
) -> str:
    """Returns a notice that the budget is too short to compile all plans that promise most; empty
    if it suffices.

    Args:
      compile_s: seconds that the first compile took.
      at_once: compiles that run at the same time.
      left: plans that promise most and are not compiled yet.
      left_s: seconds until no further compile begins.
      used_s: seconds of the budget that are used.
    """
    turns = math.ceil(left / at_once)
    affordable = min(left, at_once * math.ceil(max(left_s, 0.0) / compile_s)) if compile_s else left
    if compile_s < _SLOW_S or affordable == left:
        return ""
    minutes = math.ceil((used_s + 1.25 * turns * compile_s) / 60)
    plans = count(left, "more plan that promises much", "more plans that promise much")
    return (
        f"a compile takes {format_wait(compile_s)} here, and {at_once} at a time: the budget is "
        f"enough for about {affordable} of {plans}; give --budget {minutes}m, or the same command "
        "again goes on with the others"
    )
