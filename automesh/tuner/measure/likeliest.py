"""The plans that may be the fastest, by races and first visits.

These functions change nothing; `final` is the present `known.final()`.
"""

from __future__ import annotations

import statistics

from automesh.mesh.axes import Plan
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.measure.decision import raced_against
from automesh.tuner.measure.final import Final
from automesh.tuner.measure.known import Known


def contenders(known: Known, final: Final) -> list[Plan]:
    """Returns plans that may be the fastest by the races, the likeliest first."""
    own = [plan for plan in final.baseline if plan not in final.failed]
    reference = [*final.exported(at_look=True), *own, *leaders(known, final)]
    if not reference:
        return []
    if not known.raced():
        return list(dict.fromkeys([*reference, *by_first_visit(known, final)]))
    raced = raced_against(known.records.races, final, reference[0])
    undecided = [plan for plan, one in raced if one.verdict == "undecided"]
    # Races without a plan in common cannot be compared.
    compared = {plan for plan, _ in raced}
    open_plans = known.raced() - compared - _beaten(known)
    apart = [plan for plan in by_first_visit(known, final) if plan in open_plans]
    return list(dict.fromkeys([reference[0], *undecided, *apart]))


def leaders(known: Known, final: Final) -> list[Plan]:
    """Returns the likeliest plan; a plan that already ran in fresh processes comes before
    others."""
    beaten = _beaten(known)
    begun = [plan for row in final.rows for plan in row if plan not in beaten]
    likely = dict.fromkeys([*_race_leaders(known, final), *begun])
    return sorted(likely, key=lambda plan: -final.count(plan))[:1]


def by_first_visit(known: Known, final: Final) -> list[Plan]:
    """Returns all visited plans that may be exported, the fastest first."""
    seen = {
        plan: statistics.median(one.first.samples_s)
        for plan, one in known.calibrations.items()
        if plan not in final.failed
    }
    return sorted(seen, key=lambda plan: (seen[plan], str(plan)))


def anchors(known: Known) -> list[Plan]:
    """Returns finished plans with which newcomers are raced: times of different races cannot be
    compared."""
    final = known.final()
    plans = dict.fromkeys([*known.baseline, *final.exported(), *known.incumbent])
    found = [plan for plan in plans if may_be_exported(known.done.get(plan))]
    if found or not known.raced():
        return found
    # There is no rule yet: the survivors of an earlier race link this race with it.
    return [plan for plan in leaders(known, final) if may_be_exported(known.done.get(plan))]


def _race_leaders(known: Known, final: Final) -> list[Plan]:
    """Returns the fastest of the last race that has survivors; without races, of the first
    visits."""
    for race in reversed(known.records.races):
        alive = [
            (statistics.median(values), str(plan), plan)
            for plan, values in race.rounds
            if values and plan not in race.beaten and plan not in final.failed
        ]
        if alive:
            return [min(alive)[2]]
    return [] if known.raced() else by_first_visit(known, final)[:1]


def _beaten(known: Known) -> set[Plan]:
    return {plan for race in known.records.races for plan in race.beaten}
