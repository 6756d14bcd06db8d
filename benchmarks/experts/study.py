"""One expert's mesh against what the ladder finds for the same step on the same devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome, OutOfMemory
from automesh.tuner.choose.beliefs import compile_order, refined_times
from automesh.tuner.choose.memory_belief import large_last
from automesh.units import format_bytes, format_seconds
from benchmarks.experts.presets import Expert
from benchmarks.support.compiles import Bench, Case, bench

# Closer replays would not be told apart on a clock.
TIE = 0.005
_TOP = 5
# An estimate of memory is seldom this far above what the compiler then needs.
_TOO_LARGE = 1.15
_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two plans.

    Attributes:
      step_s: replayed; 0 if it was not, or does not fit.
      verdict: on its memory, or on why there is none, in words.
      causes: (cause, seconds) of the replay, or of the estimate where nothing was compiled.
    """

    plan: str
    estimated_s: float = 0.0
    step_s: float = 0.0
    verdict: str = "not compiled"
    causes: tuple[tuple[str, float], ...] = ()

    @property
    def fits(self) -> bool:
        """False if a compiler said that it does not."""
        return not self.verdict.startswith(_NOT_FIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a preset.

    Attributes:
      legal: plans of the example's shipped space at the expert's knobs.
      excluded: the rules of that space that the expert's mesh breaks, in words.
      rank: of the expert's mesh among all plans, from 1; 0 if it does not fit.
      compiled: plans that were.
      ours: the best by replay among those that the ladder chose; by estimate if none was compiled.
      ratio: replayed time of the expert's mesh over that of ours; 0 if either has none.
      accumulated: what more microbatches did for a mesh that does not fit as published.
    """

    id: str
    legal: int
    excluded: tuple[str, ...]
    rank: int
    compiled: int
    expert: Side
    ours: Side
    ratio: float = 0.0
    cause: str = ""
    accumulated: str = ""

    @property
    def in_top5(self) -> bool:
        return 1 <= self.rank <= _TOP


@dataclass(slots=True, kw_only=True)
class Study:
    """Compiles for one preset until the leaders are known.

    Attributes:
      plan: the expert's.
      is_leader: whether the estimate alone puts it among the leaders.
    """

    expert: Expert
    one: Bench
    plan: Plan
    is_leader: bool = False
    _outcomes: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])

    def climb(self, *, leaders: int, workers: int) -> None:
        """Compiles the expert's plan and the leaders: in every round the best by what is known."""
        most = 3 * leaders + 1  # compiles, if plan after plan does not fit
        self.is_leader = self.plan in self.order()[:leaders]
        wanted = [self.plan, *(plan for plan in self.order() if plan != self.plan)][:workers]
        while wanted:
            self.one.compile(wanted, workers=workers)
            judged = self.one.preparation.device_memory.judged
            for plan in wanted:
                outcome = self.one.outcome(plan)
                assert outcome is not None
                self._outcomes[plan] = judged(outcome)
            known = self._outcomes
            fit = sum(isinstance(known[plan], Compiled) for plan in self._led())
            left = min(leaders - fit, most - len(known), workers)
            wanted = [plan for plan in self.order() if plan not in known][: max(left, 0)]

    def order(self) -> tuple[Plan, ...]:
        """The legal plans, best first by estimates that replays have corrected; large ones last."""
        preparation, estimates = self.one.preparation, self.one.estimates
        legal = [plan for plan in self.one.legal.enumeration.legal if plan in estimates]
        order = compile_order(
            legal,
            refined_times(list(estimates), estimates, {}, self._outcomes),
            estimates,
            {},
            usual=legal[0],
            first=(),
            device_memory_bytes=preparation.device_memory.free_bytes,
        )
        return large_last(order, estimates, preparation.device_memory)

    def row(self) -> Row:
        """What is known now."""
        preparation, estimates = self.one.preparation, self.one.estimates
        legal = self.one.legal.enumeration.legal
        times = believed_s(estimates, self._outcomes, preparation.device_memory.free_bytes)
        found = [plan for plan in self._led() if plan in times] or list(self.order()[:1])
        best = min(found, key=lambda plan: times.get(plan, float("inf")))
        expert, ours = self._side(self.plan), self._side(best)
        ratio = expert.step_s / ours.step_s if expert.step_s and ours.step_s else 0.0
        return Row(
            id=self.expert.id,
            legal=len(legal),
            excluded=tuple(
                f"{one.rule} ({one.detail})"
                for one in self.one.legal.enumeration.reasons_against(self.plan)
            ),
            rank=rank_of(self.plan, times),
            compiled=sum(isinstance(one, Compiled) for one in self._outcomes.values()),
            expert=expert,
            ours=ours,
            ratio=ratio,
            cause=difference(expert, ours),
        )

    def _led(self) -> list[Plan]:
        """What was compiled because the ladder asked for it."""
        return [plan for plan in self._outcomes if plan != self.plan or self.is_leader]

    def _side(self, plan: Plan) -> Side:
        outcome, estimated = self._outcomes.get(plan), self.one.estimates[plan]
        room = self.one.preparation.device_memory
        match outcome:
            case Compiled(replay=replay, memory=memory) if replay is not None:
                peak = format_bytes(memory.peak_bytes)
                return Side(
                    plan=str(plan),
                    estimated_s=estimated.step_s,
                    step_s=replay.step_s,
                    verdict=f"fits: {peak} of {format_bytes(room.limit_bytes)}",
                    causes=replay.causes,
                )
            case OutOfMemory(needed_bytes=needed, limit_bytes=limit, reserve_bytes=reserve):
                verdict = f"{_NOT_FIT}: {format_bytes(needed)} of {format_bytes(limit)}"
                if reserve:
                    verdict += f", {format_bytes(reserve)} of it in reserve"
            case None:
                verdict = f"not compiled, about {format_bytes(estimated.memory_bytes)}"
            case _:
                verdict = str(getattr(outcome, "reason", outcome.kind))
        return Side(
            plan=str(plan),
            estimated_s=estimated.step_s,
            verdict=verdict,
            causes=() if outcome else estimated.causes,
        )


def studied(
    expert: Expert, folder: Path, *, leaders: int, workers: int, compiling: bool = True
) -> Row:
    """Estimates all plans of a preset, compiles the expert's and the leaders, and compares.

    Raises:
      UsageError: the step or its plans cannot be used.
      RuntimeError: the expert's mesh has no estimate.
    """
    case = Case(
        name=expert.id,
        script=expert.script,
        argv=expert.argv,
        target=expert.target,
        space=expert.space,
        baseline=expert.baseline,
    )
    with bench(case, folder, lambda legal: legal) as one:
        plan = one.legal.baseline[0]
        if plan not in one.estimates:
            raise RuntimeError(f"the expert's {plan} has no estimate: {one.missing.get(plan, '')}")
        study = Study(expert=expert, one=one, plan=plan)
        if compiling:
            study.climb(leaders=leaders, workers=workers)
        return study.row()


def believed_s(
    estimates: Mapping[Plan, Estimated], outcomes: Mapping[Plan, Outcome], free_bytes: int
) -> dict[Plan, float]:
    """Seconds of the plans that may fit: replayed, else estimated and corrected by the replays."""
    view = refined_times(list(estimates), estimates, {}, outcomes)
    times: dict[Plan, float] = {}
    for plan, estimated in estimates.items():
        outcome = outcomes.get(plan)
        if isinstance(outcome, Compiled):
            times[plan] = outcome.step_s
        elif outcome is None and not 0 < free_bytes < estimated.memory_bytes / _TOO_LARGE:
            times[plan] = view.step_s(plan)
    return times


def rank_of(plan: Plan, times: Mapping[Plan, float]) -> int:
    """The place of a plan among all, from 1, ties in its favour; 0 if it has no time."""
    if plan not in times:
        return 0
    limit_s = times[plan] / (1 + TIE)
    return 1 + sum(seconds < limit_s for other, seconds in times.items() if other != plan)


def difference(expert: Side, ours: Side) -> str:
    """What makes one of two sides slower, in words; empty for a tie or without causes."""
    if expert.plan == ours.plan or not expert.causes or not ours.causes:
        return ""
    pair = (dict(expert.causes), dict(ours.causes))
    totals = [sum(side.values()) for side in pair]
    if abs(totals[0] - totals[1]) <= TIE * min(totals):
        return ""
    slow = 0 if totals[0] > totals[1] else 1
    more = {
        cause: pair[slow].get(cause, 0.0) - pair[1 - slow].get(cause, 0.0)
        for cause in dict.fromkeys([*pair[0], *pair[1]])
    }
    ranked = sorted(more.items(), key=lambda item: -item[1])
    who = ("the expert's", "ours")[slow]
    said = f"{who} spends {_named(ranked[0], pair, slow)}"
    if len(ranked) > 1 and ranked[1][1] > 0.25 * ranked[0][1]:
        said += f" and {_named(ranked[1], pair, slow)}"
    if ranked[-1][1] < -0.1 * ranked[0][1]:
        said += f"; it saves {format_seconds(-ranked[-1][1])} on {ranked[-1][0]}"
    return said


def _named(item: tuple[str, float], pair: Sequence[Mapping[str, float]], slow: int) -> str:
    cause, seconds = item
    sides = [format_seconds(pair[side].get(cause, 0.0)) for side in (slow, 1 - slow)]
    return f"{format_seconds(seconds)} more on {cause} ({sides[0]} against {sides[1]})"
