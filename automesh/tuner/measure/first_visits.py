"""First visits: whether a plan runs, whether it computes the same as the reference, and how long it
takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, TimedOut
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.leased_pool import LivePool
from automesh.tuner.measure.numerics import Reference, find_reference, on_one_device
from automesh.tuner.measure.schedule import (
    BoundedPool,
    Calibration,
    Subject,
    VisitRules,
    calibrate,
)
from automesh.tuner.measure.time_left import TimeLeft
from automesh.tuner.study.retrace import other_program
from automesh.tuner.workers import memory_share_bytes
from automesh.units import format_seconds, format_wait

_NO_REFERENCE = (
    "the time was used up before any step could be run whose losses the others are compared with; "
    "give it more --budget, or see with --timeout whether it hangs"
)
# How late the only visits of a search may be: a share of the budget, or seconds.
_LATE_SHARE = 0.5
_LATE_S = 60.0


@dataclass(slots=True, kw_only=True)
class FirstVisits:
    """Makes the first visits of one search."""

    known: Known
    time_left: TimeLeft
    pool: LivePool
    rules: VisitRules
    _is_told: bool = field(init=False, default=False)

    def visit_all(self, plans: Sequence[Plan]) -> None:
        """Visits every plan once, and drops those that fail or compute something else.

        When the time for this is over, the remaining plans wait for the next search.
        """
        known, search = self.known, self.known.search
        # If the time is used up already, a process would be ended before it has begun to work.
        is_over = not known.calibrations and self.time_left.now_s >= self.time_left.end_s
        if not is_over:
            self.ensure_reference(plans)
        if known.reference is None:
            # The time is used up, and nothing shows whether other plans are right.
            if not known.calibrations:
                self._run_late(plans)
            return
        for number, plan in enumerate(plans):
            is_due = sum(one in known.calibrations for one in plans) < 2
            if not is_due and self.time_left.now_s > self.time_left.race_deadline_s(plans):
                break
            self.visit(plan)
            search.progress.phase("measure", total=len(plans), done=number + 1, note="first visits")
        known.note_visits()

    def visit(self, plan: Plan) -> None:
        """Visits a plan for the first time, and drops it if it computes something else."""
        known = self.known
        if plan not in known.calibrations:
            self._visit(plan)
        if plan in known.calibrations and known.reference is not None:
            known.judge(plan, known.reference)

    def _run_late(self, plans: Sequence[Plan]) -> None:
        """Runs two plans although the time is over: a search that has compiled plans should end
        with a measured time, and a second one to compare it with.

        The second plan runs in the process of the first, if this takes at most half of the time
        that the first one may take including the start of the process.
        """
        known, search = self.known, self.known.search
        more_s = min(self.rules.timeout_s, max(_LATE_SHARE * search.request.budget_s, _LATE_S))
        for plan in [plan for plan in plans if plan not in known.done]:
            first = next(iter(known.calibrations.values()), None)
            why = "the time was used up before any plan had run"
            if first is not None:
                more_s /= 2
                if first.first.setup_s + first.whole_s > more_s:
                    return
                why = f"{first.plan} alone says nothing of others"
            search.progress.notice(f"{why}: {plan} is run once all the same")
            late = BoundedPool(pool=self.pool, until_s=search.clock() + more_s, clock=search.clock)
            self._visit(plan, late)
            self.ensure_reference(plans)  # The baseline just ran without a time limit.
            if plan in known.calibrations and known.reference is not None:
                known.judge(plan, known.reference)
            known.note_visits()
            if first is not None or late.is_over:
                return

    def _visit(self, plan: Plan, within: BoundedPool | None = None) -> None:
        """Visits a plan; records its failure, unless the only reason is that the time was used
        up."""
        known, search = self.known, self.known.search
        begun_s, bounded = search.clock(), within or self._bounded()
        if bounded.is_over:
            return
        search.progress.now(f"{plan}, first visit")
        found = calibrate(
            bounded,
            self.subject,
            plan,
            rules=self.rules,
            clock=search.clock,
            is_reference=plan in known.baseline,
        )
        if isinstance(found, TimedOut) and bounded.is_over:
            spent_s = search.clock() - begun_s
            search.progress.notice(
                f"{plan} was still in its first visit, for {format_wait(spent_s)}, when the time "
                "was used up; give it more --budget, or see with --timeout whether it hangs"
            )
            return
        if not isinstance(found, Calibration):
            known.finish(plan, found)
            return
        compiled = known.compiled.get(plan)
        if isinstance(compiled, Compiled) and compiled.fingerprint != found.first.fingerprint:
            known.finish(plan, other_program(self.subject.sources))
            return
        known.calibrations[plan] = found

    def ensure_reference(self, plans: Sequence[Plan]) -> None:
        """Finds the reference for the losses of the others: the baseline if it runs, else another
        plan.

        If there is no time for that, `Known.reference` stays None, and the next search finds one.
        """
        if self.known.reference is not None:
            return
        found = self._reference(plans)
        if found.plan or not self._bounded().is_over:
            self.known.use_reference(found)
            return
        if not self._is_told:
            self.known.search.progress.notice(_NO_REFERENCE)
        self._is_told = True

    def _reference(self, plans: Sequence[Plan]) -> Reference:
        known = self.known
        baseline = [plan for plan in known.baseline if plan in plans]
        for plan in baseline:
            if plan not in known.calibrations:
                self._visit(plan)
        ran = [known.calibrations[plan] for plan in baseline if plan in known.calibrations]
        if alone := self._alone(ran):
            return alone
        return find_reference(
            self._bounded(),
            self.subject,
            baseline=ran,
            plans=known.search.legal.plans,
            rules=self.rules,
        )

    def _alone(self, baseline: Sequence[Calibration]) -> Reference | None:
        """Times the step of a script that makes no mesh, as the script runs it, on one device.
        Returns None for any other script, and where the step does not run so."""
        preparation = self.known.search.preparation
        capture = preparation.step.entry.capture
        if capture is None or capture.makes_mesh:
            return None
        single = on_one_device(self.known.search.legal.plans[0])
        self.known.search.progress.now("running the step on one device, as the script does")
        found = calibrate(
            self._bounded(),
            self.subject,
            single,
            rules=self.rules,
            clock=self.known.search.clock,
            is_reference=True,
        )
        if not isinstance(found, Calibration):
            return None
        name = f"the step on one device{_said_of_time(found, baseline)}"
        return Reference.of(name, single, found.first)

    def _bounded(self) -> BoundedPool:
        """Returns the workers with a bound, because nobody knows how long first visits take and the
        search must end."""
        return BoundedPool(
            pool=self.pool, until_s=self.time_left.last_s, clock=self.known.search.clock
        )

    @property
    def subject(self) -> Subject:
        """The attributes that all visits share."""
        preparation = self.known.search.preparation
        inspection = preparation.inspection
        return Subject(
            step=preparation.step,
            cache_dir=str(self.known.search.cache_dir or ""),
            sources=(*inspection.sources, *inspection.reads.files),
            fits=self._fit_together,
        )

    def _fit_together(self, plans: Sequence[Plan]) -> bool:
        """Whether the states of these plans, and a step of each, fit into the memory at once."""
        found = [self.known.compiled.get(plan) for plan in plans]
        peaks = [one.memory.peak_bytes for one in found if isinstance(one, Compiled)]
        return len(peaks) == len(found) and sum(peaks) <= self._room_bytes

    @property
    def _room_bytes(self) -> int:
        """Memory on one device that plans may share; on CPU devices half of a worker's memory."""
        search = self.known.search
        memory = search.preparation.device_memory
        if memory.limit_bytes:
            return memory.limit_bytes - memory.reserve_bytes
        worker_bytes = search.request.memory_limit_bytes or memory_share_bytes(1)
        return worker_bytes // (2 * search.preparation.aim.num_devices)


def _said_of_time(alone: Calibration, baseline: Sequence[Calibration]) -> str:
    """Returns a sentence about the time of a step on one device at its first visit, and whether
    several devices are faster."""
    alone_s = median(alone.first.samples_s)
    said = f", which takes {format_seconds(alone_s)}"
    for other in baseline:
        other_s = median(other.first.samples_s)
        if other_s >= alone_s:
            mesh = other.plan.mesh
            said += f" (one device is right: {mesh} takes {format_seconds(other_s)})"
    return said
