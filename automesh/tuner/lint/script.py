"""Finds problems in the program of a script's step on its mesh, and tries their cures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.cost.terms import Cure, Finding, Terms, value_of
from automesh.errors import UsageError
from automesh.hardware import clusters_in, parse_target
from automesh.hardware.model import HardwareModel
from automesh.ir.findings.variants import variants
from automesh.launch.cluster import workers_of
from automesh.mesh.axes import Plan
from automesh.outcomes import Failure
from automesh.program.nouns import Propagation
from automesh.report.explain.nouns import Explained
from automesh.report.findings import BROKEN, RULES
from automesh.report.lint.change import change_of
from automesh.report.lint.nouns import Linted, LintReport, Tried
from automesh.report.progress import Progress
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.explain.mesh import Ground, estimate_of, explained
from automesh.tuner.explain.study import hardware_for
from automesh.tuner.lint.places import files_by_name
from automesh.tuner.lint.plans import plan_named
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.capture import space_for
from automesh.tuner.session import Session, open_session
from automesh.tuner.study.identity import workload_name
from automesh.tuner.workers import ask
from automesh.worker.messages import PropagateJob
from automesh.worker.temporary import temporary_folder

# A finding is shown if it concerns this part of a device's memory in the step, or of the step's
# time.
_SHARE = 0.01
# Always shown: a loop with these findings is not the loop that its author intended.
# Findings that cost only time, or a compile, have no bytes to be weighed by.
ALWAYS = frozenset(name for name, rule in RULES.items() if rule.is_always_shown)
_MOST_TRIED = 12
# A cure is shown if it saves this part of the memory or of the time.
_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A finding on the plan where it costs most, and how many plans have it."""

    finding: Finding
    side: Explained
    plans: int

    @property
    def weight(self) -> float:
        """The finding's part of the memory plus its part of the time."""
        side = self.side
        held = _bytes(self.finding, side) / max(side.estimated.memory_bytes, 1.0)
        return held + _seconds(self.finding, side) / max(side.estimated.step_s, 1e-12)

    @property
    def is_shown(self) -> bool:
        return self.finding.rule in ALWAYS or self.weight >= _SHARE


def lint_script(
    request: SearchRequest, *, script: str, mesh: str, every: bool, progress: Progress
) -> LintReport:
    """Finds problems in a script's step on one mesh, or on all meshes of a target.

    Args:
      script: the script as the user gave it.
      mesh: a mesh, optionally followed by knobs; empty for the script's own.
      every: whether to examine all meshes and report each finding once.

    Raises:
      UsageError: bad input, or no such mesh.
      NoFeasibleMesh: no mesh is legal.
    """
    target = parse_target(request.target, os.environ, clusters_in(request.hardware))
    # As in a dry run, nothing is measured.
    request, target, space = space_for(replace(request, dry_run=True), target, progress)
    with (
        temporary_folder("lint") as folder,
        workers_of(request, target, progress) as start_worker,
        open_session(request, target, space, progress, start_worker=start_worker) as session,
    ):
        preparation = session.preparation
        choose, notices = _choice(session, mesh, every=every)
        chosen: list[Plan] = []

        def noting(plans: Sequence[Plan]) -> Sequence[Plan]:
            chosen[:] = choose(plans)
            return chosen

        estimates = session.estimate(share=1.0, choose=noting, terms_folder=folder)
        if estimates.fabric is None:
            raise UsageError(f"the devices of `{request.target}` do not say how they are wired")
        kept = TermsCache(
            folder=folder,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
        ).all()
        plans = [plan for plan in chosen if plan not in estimates.missing]
        if not plans:
            plan, why = next(iter(estimates.missing.items()))
            raise UsageError(f"`{plan}` has no estimate: {why}")
        aim = preparation.aim
        hardware = hardware_for(
            estimates.fabric, plans, platform=aim.platform, device_kind=aim.device_kind
        )
        ground = Ground(kept=kept, hardware=hardware, command="")
        found = _grouped(explained(plan, ground, None) for plan in plans)
        shown = [one for one in found if one.is_shown]
        trial = _Trial(session=session, hardware=hardware, progress=progress)
        tried = trial.all(shown[:_MOST_TRIED])
    names = frozenset(one.finding.source.rpartition(":")[0] for one in shown)
    files = files_by_name(_path_of(request), names - {""})
    return LintReport(
        script=script,
        workload=workload_name(request.entry),
        target=preparation.selector,
        device=aim.device_kind,
        device_count=aim.num_devices,
        plans=tuple(map(str, plans)),
        findings=tuple(_linted(one, tried.get(n), files) for n, one in enumerate(shown)),
        smaller=len(found) - len(shown),
        missing=tuple((str(plan), why) for plan, why in estimates.missing.items()),
        notices=tuple(dict.fromkeys((*request.notices, *notices))),
        speeds=hardware.speeds.origin,
    )


def _path_of(request: SearchRequest) -> Path | None:
    path = Path(request.entry.location)
    return path.resolve() if path.suffix == ".py" and path.is_file() else None


def _choice(
    session: Session, mesh: str, *, every: bool
) -> tuple[Callable[[Sequence[Plan]], Sequence[Plan]], tuple[str, ...]]:
    """Chooses which of the legal plans are looked at; returns a function that selects them, and
    notices."""
    baseline = session.legal.baseline
    if mesh.strip():
        devices = session.preparation.aim.num_devices
        plans = tuple(dict.fromkeys([*session.legal.enumeration.legal, *baseline]))
        plan, notice = plan_named(mesh, plans, num_devices=devices)
        return (lambda _: (plan,)), ((notice,) if notice else ())
    if not every and baseline:
        return (lambda _: baseline[:1]), ()
    notice = (
        "the script says no mesh of its own: all are looked at, as with --all; "
        "name one to look at it alone"
    )
    return (lambda plans: plans), (() if every else (notice,))


def _grouped(sides: Iterable[Explained]) -> list[_Found]:
    """Merges equal findings, each with the plan where it costs most; the most expensive first."""
    found: dict[tuple[str, str, str], _Found] = {}
    for side in sides:
        mine = {
            (one.rule, one.source, one.array): _Found(finding=one, side=side, plans=1)
            for one in side.cost.findings
        }
        for key, one in mine.items():
            known = found.get(key)
            worst = one if known is None or one.weight > known.weight else known
            found[key] = replace(worst, plans=1 + (known.plans if known else 0))
    return sorted(found.values(), key=lambda one: (one.finding.rule not in BROKEN, -one.weight))


def _sizes(side: Explained) -> Mapping[str, int]:
    return dict(side.cost.sizes)


def _bytes(finding: Finding, side: Explained) -> float:
    return value_of(finding.bytes, _sizes(side))


def _seconds(finding: Finding, side: Explained) -> float:
    """Returns the seconds of the collectives over the finding's axes at its line, without
    overlap."""
    return sum(
        one.seconds
        for one in side.cost.collectives
        if finding.source
        and one.source == finding.source
        and finding.axes
        and set(one.axes) <= set(finding.axes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Applies cures in lowered copies of the step."""

    session: Session
    hardware: HardwareModel
    progress: Progress

    def all(self, found: Sequence[_Found]) -> Mapping[int, Tried]:
        """Returns the best cure of each finding that has a useful one."""
        tried: dict[int, Tried] = {}
        curable = [n for n, one in enumerate(found) if one.finding.cure is not None]
        for done, number in enumerate(curable):
            self.progress.now(f"trying a cure of {found[number].finding.rule}")
            self.progress.phase("cures", total=len(curable), done=done)
            best = max(self._of(found[number]), key=_gain, default=None)
            if best is not None and _gain(best) > _GAIN:
                tried[number] = best
        if curable:
            self.progress.phase("cures", total=len(curable), done=len(curable))
        return tried

    def _of(self, found: _Found) -> Iterator[Tried]:
        finding, side = found.finding, found.side
        for cure in variants(finding.cure) if finding.cure is not None else ():
            terms = self._terms(side.plan, cure)
            if terms is None:
                continue
            after = estimate_of(side.plan, terms, self.hardware)
            same = [
                one
                for one in terms.findings
                if (one.rule, one.source) == (finding.rule, finding.source)
            ]
            yield Tried(
                change=change_of(finding, cure),
                memory_bytes=(side.estimated.memory_bytes, after.memory_bytes),
                step_s=(side.estimated.step_s, after.step_s),
                is_gone=not same,
            )

    def _terms(self, plan: Plan, cure: Cure) -> Terms | None:
        """Returns the terms of the step with a cure; None if the cure does not apply or fails."""
        step = self.session.step
        mapping, knobs = plan.call
        job = PropagateJob(
            step=step.step,
            axis_names=step.axis_names,
            knobs=knobs,
            sizes=tuple((axis.name, axis.size) for axis in plan.axes if axis.size > 1),
            probes=(),
            platform=step.platform,
            mapping=mapping,
            seen=step.seen,
            cure=cure,
        )
        answer = ask(self.session.pool, job, Propagation, self.session.request.timeout_s)
        if isinstance(answer, Failure):
            self.progress.log(f"the cure `{cure.kind}` could not be tried: {answer}")
            return None
        return answer.terms if answer.pipeline is None else None


def _gain(tried: Tried) -> float:
    """Returns the part of the memory plus the part of the time that a cure saves."""
    memory, step = tried.memory_bytes[0], tried.step_s[0]
    return tried.saved_bytes / max(memory, 1.0) + tried.saved_s / max(step, 1e-12)


def _linted(found: _Found, tried: Tried | None, files: Mapping[str, str]) -> Linted:
    finding, side = found.finding, found.side
    words = RULES[finding.rule]
    name, _, line = finding.source.rpartition(":")
    return Linted(
        rule=finding.rule,
        title=words.title,
        plan=str(side.plan),
        plans=found.plans,
        array=finding.array,
        axes=finding.axes,
        source=finding.source,
        file=files.get(name, ""),
        line=int(line) if line.isdecimal() else 0,
        what=words.what(finding, _sizes(side)),
        why=words.why,
        cure=words.cure(finding),
        bytes=_bytes(finding, side),
        count=value_of(finding.count, _sizes(side)),
        seconds=_seconds(finding, side),
        tried=tried,
    )
