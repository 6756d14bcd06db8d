"""Decides whether a study's script is still the one that was searched: by what runs, not by its
text alone.

A search notes what the step rests on: the user's code, the files, variables and packages that it
reads, and the program that it is traced to. If any of these has changed at the next start, the
plans that have figures are lowered. If all their programs are the same, the figures hold. Otherwise
the earlier trials stay in the study but are not ranked, and a notice names what changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from automesh.hardware import Target
from automesh.jsonio import to_json
from automesh.mesh.axes import Plan
from automesh.program.nouns import Inspection, Traced
from automesh.program.script.sources import Sources
from automesh.report.progress import Progress
from automesh.tuner.paths import as_seen
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.study import Study
from automesh.tuner.workers import memory_share_bytes, surroundings_of
from automesh.worker.messages import TraceJob
from automesh.worker.pool import Pool
from automesh.worker.process import Process, StartWorker
from automesh.worker.temporary import temporary_folder

NOTE = "grounds"
MOST_NOTED = 20
MOST_LOWERED = 12
_NAMED = 3
Pairs = tuple[tuple[str, str], ...]
Versions = Pairs
Lower = Callable[[Plan], str]
"""A function that returns the fingerprint of a plan's program as it is now; empty if it cannot be
lowered in time."""
Sameness = Literal["same", "other", "unknown"]
_MEANING: dict[Sameness, str] = {
    "same": ", the step has not: its figures hold",
    "other": ", and the step is another program: what was found before is kept, not ranked",
    "unknown": ": what was found before is kept, and taken over where the program is the same",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """The things that the figures of a script depend on: its sources, versions and environment.

    Attributes:
      source_hash: the hash that identifies its trials; the same for grounds whose programs are the
        same.
      program: fingerprint of the step on the mesh of one device.
      files: the user's code and what it opened, each with its hash.
      variables: of the environment that the code asks for, hashed.
      packages: that it imports, with their versions.
    """

    source_hash: str
    program: str
    files: Sources
    variables: Pairs
    packages: Pairs

    @property
    def identity(self) -> str:
        """Returns a hash of everything but the places of the files."""
        named = sorted((Path(path).name, inside) for path, inside in self.files)
        text = json.dumps([self.program, named, self.variables, self.packages])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The hash under which a search counts trials, and what the user should know of it."""

    source_hash: str
    notices: tuple[str, ...] = ()


def grounds_of(inspection: Inspection) -> Grounds:
    """Returns the grounds of a script as it is now; their hash is their own."""
    reads = inspection.reads
    found = Grounds(
        source_hash="",
        program=inspection.fingerprint,
        files=(*inspection.sources, *reads.files),
        variables=reads.variables,
        packages=reads.distributions,
    )
    return replace(found, source_hash=found.identity)


def settle(study: Study, now: Grounds, versions: Versions, lower: Lower | None) -> Settled:
    """Decides whether the trials of a study are of the script as it is now, and stores the
    decision.

    Args:
      versions: of everything else whose change makes figures stale.
      lower: is called for plans with a known program, only if something changed; None if they
        cannot be lowered here as they were.
    """
    noted = _noted(study)
    same = next((one for one in reversed(noted) if one.identity == now.identity), None)
    if same is not None:
        _note(study, [*(one for one in noted if one != same), same])
        return Settled(source_hash=same.source_hash)
    if not noted:
        _note(study, [now])
        return Settled(source_hash=now.source_hash)
    last = noted[-1]
    programs = _programs(study, last.source_hash, versions)
    if not programs:
        # Nothing rests on what was before.
        _note(study, [*noted, now])
        return Settled(source_hash=now.source_hash)
    changed = changes(last, now)
    what = _listed(changed) or "nothing that it reads"
    verb = "has" if len(changed) <= 1 else "have"
    sameness = _compare(last, now, programs, lower)
    if sameness == "same":
        now = replace(now, source_hash=last.source_hash)
    notice = f"{what} {verb} changed since the last search{_MEANING[sameness]}"
    _note(study, [*noted, now])
    return Settled(source_hash=now.source_hash, notices=(notice,))


def changes(before: Grounds, now: Grounds) -> tuple[str, ...]:
    """Lists what has changed, each in a few words."""
    return (
        *_changed_files(before.files, now.files),
        *(f"the variable {name}" for name in _changed(before.variables, now.variables)),
        *(
            _changed_package(name, dict(before.packages).get(name), dict(now.packages).get(name))
            for name in _changed(before.packages, now.packages)
        ),
    )


def changed_versions(before: Versions, now: Versions) -> tuple[str, ...]:
    """Lists versions and variables of the environment that have changed."""
    old, new = dict(before), dict(now)
    return tuple(
        f"{name} was {old.get(name) or 'not there'}, is {new.get(name) or 'not there'}"
        for name in _changed(before, now)
    )


def _compare(
    last: Grounds, now: Grounds, programs: Sequence[tuple[Plan, str]], lower: Lower | None
) -> Sameness:
    if last.program != now.program:
        return "other"
    if lower is None or len(programs) > MOST_LOWERED:
        return "unknown"
    for plan, fingerprint in programs:
        found = lower(plan)
        if found != fingerprint:
            return "other" if found else "unknown"
    return "same"


def _programs(study: Study, source_hash: str, versions: Versions) -> list[tuple[Plan, str]]:
    """Returns plans whose programs are known, one for each choice of knobs, measured ones first."""
    known = {
        trial.plan: trial.fingerprint
        for trial in study.compile.trials()
        if trial.matches(source_hash, versions) and trial.fingerprint
    }
    measured = [trial.plan for trial in study.measure.trials() if trial.plan in known]
    chosen: dict[object, tuple[Plan, str]] = {}
    for plan in (*measured, *known):
        choice = (plan.knobs, plan.mapping, plan.compiler_options)
        chosen.setdefault(choice, (plan, known[plan]))
    return list(chosen.values())


def _noted(study: Study) -> list[Grounds]:
    """Reads the grounds of former searches, without those that are damaged."""
    rows: list[Any] = study.read_note(NOTE, study.noted(NOTE), list[Any]) or []
    found = [study.read_note(NOTE, row, Grounds) for row in rows]
    return [one for one in found if one is not None]


def _note(study: Study, noted: Sequence[Grounds]) -> None:
    study.note(NOTE, [to_json(one, Grounds) for one in noted[-MOST_NOTED:]])


def _changed_files(before: Sources, now: Sources) -> list[str]:
    old = {(Path(path).name, inside) for path, inside in before}
    new = {(Path(path).name, inside) for path, inside in now}
    names = {Path(path).name for path, _ in before}
    here = {Path(path).name for path, _ in now}
    found = [
        f"`{as_seen(Path(path))}`" + ("" if Path(path).name in names else " (not read before)")
        for path, inside in now
        if (Path(path).name, inside) not in old
    ]
    return found + [
        f"`{as_seen(Path(path))}` (not read any more)"
        for path, inside in before
        if (Path(path).name, inside) not in new and Path(path).name not in here
    ]


def _changed(before: Pairs, now: Pairs) -> list[str]:
    old, new = dict(before), dict(now)
    return [name for name in sorted(old | new) if old.get(name) != new.get(name)]


def _changed_package(name: str, old: str | None, new: str | None) -> str:
    match old, new:
        case None, str():
            return f"{name} {new} (not imported before)"
        case str(), None:
            return f"{name} (not imported any more)"
        case _:
            return f"{name} {old} (now {new})"


def _listed(changed: Sequence[str]) -> str:
    named = list(changed[:_NAMED])
    if len(changed) > _NAMED:
        named.append(f"{len(changed) - _NAMED} more")
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


# By which hash a search knows its trials: what changed is looked at before anything is tried.

# Of the budget: what cannot be lowered in this time counts as another program.
LOWER_SHARE = 0.1


def settled(
    request: SearchRequest,
    target: Target,
    preparation: Preparation,
    legal: LegalPlans,
    study: Study,
    progress: Progress,
    clock: Callable[[], float],
    start_worker: StartWorker = Process,
) -> tuple[Preparation, LegalPlans]:
    """Decides which stored trials hold for the script as it is now. Returns the preparation with
    the hash of these trials, and the plans with notices about what changed.

    The study counts by the hash, too, from then on.
    """
    with temporary_folder("lower") as folder:
        lowering = _Lowering(
            request=request,
            target=target,
            preparation=preparation,
            study=study,
            progress=progress,
            folder=folder,
            clock=clock,
            start_worker=start_worker,
            until_s=clock() + LOWER_SHARE * request.budget_s,
        )
        found = settle(
            study,
            grounds_of(preparation.inspection),
            preparation.provenance,
            # Programs for absent devices are lowered by their compiler's processes.
            lowering.lower if target.absent is None else None,
        )
        lowering.close()
    study.count_for(found.source_hash)
    for notice in found.notices:
        progress.notice(notice)
    return (
        replace(preparation, source_hash=found.source_hash),
        legal.with_notices(tuple(found.notices)),
    )


@dataclass(slots=True, kw_only=True)
class _Lowering:
    """Lowers plans as the rungs do, in a process of its own that starts when it is needed."""

    request: SearchRequest
    target: Target
    preparation: Preparation
    study: Study
    progress: Progress
    folder: Path
    clock: Callable[[], float]
    until_s: float
    start_worker: StartWorker
    _pool: Pool | None = None

    def lower(self, plan: Plan) -> str:
        left_s = self.until_s - self.clock()
        if left_s <= 0:
            return ""
        self.study.heartbeat()
        self.progress.now(f"lowering {plan} to see whether it is the program that it was")
        if self._pool is None:
            self._pool = Pool(
                size=1,
                surroundings=surroundings_of(self.target),
                log_dir=self.folder,
                memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(1),
                on_wait=self.progress.tick,
                start=self.start_worker,
            )
        job = TraceJob(step=self.preparation.step, plan=plan)
        answer = self._pool.run(job, min(self.request.timeout_s, left_s))
        # A plan that cannot be lowered any more is another program.
        return answer.fingerprint if isinstance(answer, Traced) else ""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
