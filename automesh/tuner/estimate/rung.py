"""The estimate rung: one propagation for each set of active axes and call of `build`, and a price
for each plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from automesh.cost.pricing import holds
from automesh.cost.terms import Terms
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Call, Plan
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated
from automesh.program.nouns import Propagation
from automesh.report.estimates import COMPILED_FIRST, NO_TIME, STEP_REFUSES, Estimates
from automesh.report.findings import FindingsOfPlans
from automesh.report.words import count
from automesh.tuner.estimate.prices import (
    Price,
    PricePipeline,
    Prices,
    price_pipeline_with_options,
    price_with_options,
    unpriced_notice,
)
from automesh.tuner.estimate.propagations import (
    Active,
    Group,
    Need,
    Sizes,
    groups_of,
    is_of,
    own_needs,
    refined_needs,
    under_schedule,
    without_schedule,
)
from automesh.tuner.estimate.propagator import Propagator
from automesh.tuner.estimate.refusals import Refusals
from automesh.tuner.estimate.standings import Standings
from automesh.worker.messages import MOST_CALLS, LayoutJob


def _most_axes_first(group: Group, promise: Callable[[Need], float]) -> list[Need]:
    """Returns the needs of a group: first the one with most axes, whose lowerings show how the
    others depend on all axes; then the most promising first."""
    return [*group.needs[:1], *sorted(group.needs[1:], key=promise)]


# The most meshes of a refused set that are tried one by one; of a script that is run for each mesh
# more, since each is run in any case.
_MOST_OTHERS, _MOST_RUNS = 8, 32
_NO_TERMS = "it needs a propagation of its own, for which the time did not suffice"
BORROWED = "a program of its own: it is priced by that of other sizes"


Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True, kw_only=True)
class EstimateRung:
    """Runs the estimate rung of one search.

    Attributes:
      layout: asks for the layouts of these ICI shapes on a torus; None if there is no torus.
      price: prices meshes by the terms of their sets of active axes.
      price_pipeline: prices meshes with the same active axes by the terms of a pipeline.
      origin: the source of the speeds, in words.
      standings: ranks the estimates so far.
      first: the script's own plan, or nothing; its propagation is done before all others.
      findings: what is found in the plans.
      until_settled: whether to stop once the first ten plans cannot change any more.
    """

    plans: Sequence[Plan]
    propagator: Propagator
    layout: Callable[[Shapes], LayoutJob] | None
    price: Price
    price_pipeline: PricePipeline
    origin: str
    standings: Standings | None = None
    first: tuple[Plan, ...] = ()
    findings: FindingsOfPlans = field(default_factory=FindingsOfPlans)
    until_settled: bool = False
    _heard: list[tuple[Need, Propagation]] = field(init=False, default_factory=list)
    _told: Layouts | None = field(init=False, default=None)
    _ticket: int | None = field(init=False, default=None)
    _terms: dict[tuple[Call, Active], Propagation] = field(init=False, default_factory=dict)
    _reasons: dict[tuple[Call, Active], str] = field(init=False, default_factory=dict)
    _found: dict[Plan, Estimated] = field(init=False, default_factory=dict)
    _missing: dict[Plan, str] = field(init=False, default_factory=dict)
    _notes: dict[str, None] = field(init=False, default_factory=dict)
    _apart: list[Need] = field(init=False, default_factory=list)
    _why_apart: Counter[str] = field(init=False, default_factory=Counter)
    _split: set[Need] = field(init=False, default_factory=set[Need])
    _pipelines: int = field(init=False, default=0)

    def run(self) -> Estimates:
        """Estimates as many plans as it can before the deadline, those with default knobs first.

        After Ctrl-C it estimates those whose propagations are done. A second Ctrl-C ends it.
        """
        plans = self.plans
        try:
            found = self._estimated()
        except KeyboardInterrupt:
            # Pricing was interrupted: all is priced again from the finished propagations.
            self.propagator.interrupt()
            self.plans = plans
            for one in (
                *(self._found, self._missing, self._reasons),
                *(self._why_apart, self._apart, self._split),
            ):
                one.clear()
            self._pipelines = 0
            found = self._estimated()
        settled_at = self.standings.settled_at if self.standings is not None else 0
        found = replace(found, is_interrupted=self.propagator.is_interrupted, settled_at=settled_at)
        settled = found.settled_detail
        return replace(found, details=(*found.details, settled)) if settled else found

    def _estimated(self) -> Estimates:
        groups = groups_of(self.plans)
        if not groups:
            return Estimates(origin=self.origin)
        # Submitted first, and done in parallel with the first propagations.
        if self.layout and self._ticket is None:
            self._ticket = self.propagator.ask(self.layout(_shapes(self.plans)))
        self._begin(groups)
        self._propagate(self._first_needs(groups))
        layouts = self._layouts()
        refused = dict(layouts.refused)
        if refused:
            self._drop(refused)
            groups = groups_of(self.plans)
            self._begin(groups)
        if not groups:
            return Estimates(
                missing=self._missing,
                origin=self.origin,
                details=tuple(self._notes),
                propagations=len(self._terms),
                layouts=layouts,
            )
        return self._priced(groups, layouts)

    def _layouts(self) -> Layouts:
        if self._told is not None:
            return self._told
        if self._ticket is None:
            shapes = _shapes(self.plans)
            self._told = Layouts(shapes=shapes, spans=((),) * len(shapes))
            return self._told
        answer = self.propagator.reply(self._ticket)
        if not isinstance(answer, Layouts):
            raise TypeError(f"a layout job was answered with {type(answer).__name__}")
        self._told = answer
        return answer

    def _first_needs(self, groups: Sequence[Group]) -> Sequence[Need]:
        """Returns the need of the script's own plan, then those with default knobs."""
        usual = groups[0].needs
        for own in self.first:
            needs = (need for group in groups if group.call == own.call for need in group.needs)
            for need in needs:
                if is_of(need, own):
                    return [need, *(one for one in usual if one is not need)]
        return usual

    def _begin(self, groups: Sequence[Group]) -> None:
        """Begins to rank the propagations of these groups as they arrive, and ranks those that
        have."""
        standings = self.standings
        if standings is None:
            return
        by_call = {group.call: group for group in groups}
        standings.begin(groups, lambda group, need: str(self._plan(group, need.members[0])))
        self._heard = [
            (need, self._terms[need.call, need.active])
            for group in groups
            for need in group.needs
            if (need.call, need.active) in self._terms
        ]

        def rank(need: Need, answer: Propagation | str) -> None:
            if isinstance(answer, str):
                standings.note_failure(need)
            else:
                self._heard.append((need, answer))
                self._rank_received(standings, by_call)
                if self.until_settled and standings.is_settled:
                    self.until_settled = False
                    self.propagator.stop(COMPILED_FIRST)

        self.propagator.heard = rank
        self.propagator.replied = lambda: self._rank_received(standings, by_call)
        if self._heard:
            self._rank_received(standings, by_call)

    def _rank_received(self, standings: Standings, groups: Mapping[Call, Group]) -> None:
        """Ranks the plans of received propagations, once the layouts of meshes are known."""
        is_laid_out = self._told is not None or self._ticket is None
        if not is_laid_out and not self.propagator.has_reply(self._ticket or 0):
            return
        layouts = self._layouts()
        refused = dict(layouts.refused)
        if refused and any(tuple(axis.ici for axis in plan.axes) in refused for plan in self.plans):
            return  # Waits until plans without a layout are left out.
        heard, self._heard = self._heard, []
        for need, made in heard:
            group = groups[need.call]
            prices = self._price_of(group, need, made, list(need.members), layouts)
            standings.learn(need, made)
            standings.note(
                need,
                prices,
                lambda row, need=need, group=group: self._plan(group, need.members[row]),
            )

    def _price_of(
        self,
        group: Group,
        need: Need,
        made: Propagation,
        members: list[int],
        layouts: Layouts,
    ) -> Prices:
        """Prices meshes of a need by its own propagation; see `_by_options`."""
        batch = Batch(
            names=group.batch.names, ici=group.batch.ici[members], dcn=group.batch.dcn[members]
        )
        plans = [self._plan(group, member) for member in members]
        if made.pipeline is None:
            terms = {need.active: made.terms}
            return price_with_options(self.price, terms, batch, layouts, plans)
        return price_pipeline_with_options(
            self.price_pipeline, (made.pipeline, made.terms), batch, layouts, plans
        )

    def _drop(self, refused: Mapping[tuple[int, ...], str]) -> None:
        """Drops meshes that jax cannot lay out on the devices."""
        shapes = {plan: tuple(axis.ici for axis in plan.axes) for plan in self.plans}
        self._missing |= {plan: refused[shapes[plan]] for plan in shapes if shapes[plan] in refused}
        self.plans = [plan for plan in self.plans if plan not in self._missing]

    def _priced(self, groups: Sequence[Group], layouts: Layouts) -> Estimates:
        usual, *others = groups
        self._add_prices(usual, layouts)
        promise = self._promise(usual)
        self._propagate(
            [need for other in others for need in _most_axes_first(other, promise)],
            is_deferred=self._is_deferred(usual, others),
        )
        for group in others:
            self._add_prices(group, layouts)
        self._propagate_pipelines({group.call: group for group in groups}, layouts)
        apart = self._propagate_apart({group.call: group for group in groups}, layouts)
        if self.standings is not None:
            self.standings.show(at_once=True)
        notes = [*self.findings.notices(len(self._found))]
        if unpriced := unpriced_notice(self.plans, self.propagator.step.platform):
            notes.append(unpriced)
        return Estimates(
            found=self._found,
            missing=self._missing,
            origin=self.origin,
            notices=tuple(notes),
            details=(*self._notes, apart) if apart else tuple(self._notes),
            propagations=len(self._terms) + self._pipelines,
            layouts=layouts,
        )

    def _is_deferred(self, usual: Group, others: Sequence[Group]) -> Callable[[Call], bool] | None:
        """Returns a function that says whether no mesh with a call can come among the first plans;
        None if all calls are done in their order: nothing bounds them, or they are so many that
        workers would lower them again."""
        standings = self.standings
        if standings is None or not standings.has_least(usual.call):
            return None
        return standings.is_behind if 1 < len(others) < MOST_CALLS else None

    def _propagate(
        self, needs: Sequence[Need], *, is_deferred: Callable[[Call], bool] | None = None
    ) -> None:
        known = self._terms.keys() | self._reasons.keys()
        left = [need for need in needs if (need.call, need.active) not in known]
        for need, answer in self.propagator.answer(left, is_deferred=is_deferred).items():
            if isinstance(answer, Propagation):
                self._terms[need.call, need.active] = answer
                self._notes |= dict.fromkeys(answer.notes)
            else:
                self._reasons[need.call, need.active] = answer

    def _promise(self, usual: Group) -> Callable[[Need], float]:
        """Returns a function that gives the seconds of a need's best estimate: at the default
        knobs, among meshes with the same active axes."""
        best: dict[Active, float] = {}
        for need in usual.needs:
            plans = [self.plans[usual.rows[member]] for member in need.members]
            times = [self._found[plan].step_s for plan in plans if plan in self._found]
            best[need.active] = min(times, default=math.inf)
        return lambda need: best.get(need.active, math.inf)

    def _add_prices(self, group: Group, layouts: Layouts) -> None:
        """Prices all meshes of a group whose sets of active axes have terms."""
        propagations = {
            need.active: self._terms[group.call, need.active]
            for need in group.needs
            if (group.call, need.active) in self._terms
        }
        terms = {active: one.terms for active, one in propagations.items()}
        plans = [self.plans[row] for row in group.rows]
        prices = price_with_options(self.price, terms, group.batch, layouts, plans)
        for need in group.needs:
            plans = [self.plans[group.rows[member]] for member in need.members]
            if need.active not in terms:
                reason = self._reasons.get((group.call, need.active), NO_TIME)
                self._missing |= dict.fromkeys(plans, reason)
                self._try_others(group, need, reason)
                continue
            self._take(group, need, propagations[need.active], prices, need.members)

    def _take(
        self, group: Group, need: Need, made: Propagation, prices: Prices, rows: Sequence[int]
    ) -> None:
        """Keeps the prices of a need's meshes if its terms hold there, and lists the other meshes.

        Args:
          prices: prices of a batch that contains these meshes.
          rows: rows of the need's members in that batch.
        """
        contradicted = any(_says_to_hold(made.terms, probe) for probe in made.failed_probes)
        wrong: list[int] = []
        for member, row in zip(need.members, rows, strict=True):
            plan = self._plan(group, member)
            if prices.needs_own[row]:
                self._missing.setdefault(plan, _NO_TERMS)
            else:
                estimated = prices.estimated(row)
                rules = tuple(
                    dict.fromkeys(one.rule for one in made.terms.findings if one.is_on(plan.sizes))
                )
                if rules:
                    estimated = replace(estimated, findings=rules)
                if all(plan.sizes[axis] == size for axis, size in made.terms.sampled):
                    estimated = replace(estimated, own_propagation=True)
                self._keep(plan, estimated, borrowed=contradicted)
                if not contradicted:
                    self.findings.add(plan, estimated.step_s, made.terms)
            if contradicted or prices.needs_own[row]:
                wrong.append(member)
        if wrong:
            self._why_apart[_why_apart(made)] += len(wrong)
            self._apart += (
                own_needs(need, group.batch, wrong)
                if contradicted
                else refined_needs(need, group.batch, wrong, made.terms)
            )

    def _keep(self, plan: Plan, estimated: Estimated, *, borrowed: bool = False) -> None:
        self._missing.pop(plan, None)
        if borrowed:  # Good enough for an order until its own propagation, but not for a bound.
            uncounted = (*estimated.uncounted, BORROWED)
            estimated = replace(estimated, bound_s=0.0, uncounted=uncounted)
        if 0 < estimated.step_s < math.inf:
            self._found[plan] = estimated
        else:
            self._missing[plan] = f"its terms give {estimated.step_s} s, which is no time"

    def _propagate_pipelines(self, groups: Mapping[Call, Group], layouts: Layouts) -> None:
        """Propagates pipelines; those that differ in their schedule alone share a propagation."""
        firsts: dict[Hashable, Need] = {}
        others: list[Need] = []
        for need in (need for group in groups.values() for need in group.pipelined):
            if firsts.setdefault(without_schedule(need), need) is not need:
                others.append(need)
        answers = self._answer_pipelines([*firsts.values()], groups, layouts)
        alone: list[Need] = []
        for need in others:
            first = firsts[without_schedule(need)]
            answer = answers[first]
            shared = (
                under_schedule(answer, need, first) if isinstance(answer, Propagation) else None
            )
            if shared is None:
                alone.append(need)
            else:
                self.propagator.keep(need, shared)
                self.propagator.heard(need, shared)
                self._take_apart(groups[need.call], need, shared, layouts)
        # The remaining ones may share propagations as well.
        if alone:
            left = {call: replace(group, pipelined=()) for call, group in groups.items()}
            for need in alone:
                group = left[need.call]
                left[need.call] = replace(group, pipelined=(*group.pipelined, need))
            self._propagate_pipelines(left, layouts)

    def _answer_pipelines(
        self, needs: Sequence[Need], groups: Mapping[Call, Group], layouts: Layouts
    ) -> Mapping[Need, Propagation | str]:
        answers = self.propagator.answer(needs, note="pipelines") if needs else {}
        for need, answer in answers.items():
            self._take_apart(groups[need.call], need, answer, layouts)
            if isinstance(answer, Propagation):
                self._pipelines += 1
                self._notes |= dict.fromkeys(answer.notes)
        return answers

    def _propagate_apart(self, groups: Mapping[Call, Group], layouts: Layouts) -> str:
        """Propagates, in rounds and best first, meshes at which their set's terms do not hold;
        returns a notice."""

        def promise(need: Need) -> float:
            plans = [self._plan(groups[need.call], member) for member in need.members]
            return min((self._found[p].step_s for p in plans if p in self._found), default=math.inf)

        meshes = sum(len(need.members) for need in self._apart)
        propagations = 0
        refusals = Refusals()
        while self._apart:
            waiting, self._apart = sorted(self._apart, key=promise), []
            open_needs = list[Need]()
            for need in waiting:
                if why := refusals.why(need):
                    self.propagator.heard(need, why)
                    self._take_apart(groups[need.call], need, why, layouts)
                else:
                    open_needs.append(need)
            needs, self._apart = refusals.next_round(open_needs)
            answers = self.propagator.answer(needs, note="meshes apart") if needs else {}
            for need, answer in answers.items():
                # A script that is run for each mesh may give another one another batch.
                is_run = self.propagator.step.step.entry.is_run_for_each
                if isinstance(answer, str) and answer.startswith(STEP_REFUSES) and not is_run:
                    refusals.note(need, answer)
                self._take_apart(groups[need.call], need, answer, layouts)
            propagations += len(needs)
        if not meshes:
            return ""
        why = self._why_apart.most_common(1)[0][0]
        return (
            f"{count(meshes, 'plan')} took {count(propagations, 'further propagation')}, "
            f"because {why}"
        )

    def _take_apart(
        self, group: Group, need: Need, answer: Propagation | str, layouts: Layouts
    ) -> None:
        if not isinstance(answer, Propagation):
            plans = [self._plan(group, member) for member in need.members]
            self._missing |= {plan: answer for plan in plans if plan not in self._found}
            self._try_others(group, need, answer)
            return
        members = list(need.members)
        prices = self._price_of(group, need, answer, members, layouts)
        self._take(group, need, answer, prices, range(len(members)))

    def _try_others(self, group: Group, need: Need, reason: str) -> None:
        """Lists the other meshes of a refused need, each at its own sizes: the user's code may
        refuse the sizes that were tried, and no others, such as a pipeline of two stages."""
        is_run = self.propagator.step.step.entry.is_run_for_each
        # Uneven division explains a refusal, unless a script is run, which may have other reasons.
        explained = bool(need.uneven) and not is_run
        if explained or need in self._split or not reason.startswith(STEP_REFUSES):
            return
        self._split.add(need)
        tried = (need.sizes, need.spare)
        alone = own_needs(need, group.batch, need.members)
        others = [one for one in alone if one.sizes not in tried]
        if 0 < len(others) <= (_MOST_RUNS if is_run else _MOST_OTHERS):
            self._why_apart["the step refuses other sizes of their axes"] += len(others)
            self._apart += others

    def _plan(self, group: Group, member: int) -> Plan:
        return self.plans[group.rows[member]]


def _shapes(plans: Sequence[Plan]) -> Shapes:
    return tuple(dict.fromkeys(tuple(axis.ici for axis in plan.axes) for plan in plans))


def _why_apart(propagation: Propagation) -> str:
    if propagation.terms.fixed:
        axes = " and ".join(f"`{axis}`" for axis in propagation.terms.fixed)
        return f"the step has the size of {axes} in its shapes"
    if propagation.failed_probes:
        return "their programs differ in more than the sizes of axes"
    return "some array does not divide evenly there"


def _says_to_hold(terms: Terms, sizes: Sizes) -> bool:
    """Whether terms claim to hold at other sizes of their axes."""
    row = np.array([[size for _, size in sizes]], np.int64)
    return bool(holds(terms, tuple(axis for axis, _ in sizes), row)[0])
