"""Reads the contents of one study; runs in a process that reads studies.

This takes tens of milliseconds, or for ever if a user has damaged the study.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.errors import AutomeshError, NoFeasibleMesh
from automesh.report import words
from automesh.report.files.rule import rule_of, rule_text
from automesh.report.result import NOT_ENDED, SearchResult
from automesh.skipped import reason_of
from automesh.texts.terminal import clean
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.backend import Backend, open_backend
from automesh.tuner.study.metadata import header_in, reading
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.study import Study, open_study
from automesh_service.serve.reading.messages import from_message, known_of, packed, to_message
from automesh_service.serve.reading.summary import KnownStudy, State, StudySummary

_MOST_OPEN = 16
_KEPT_OPEN = ("server",)
"""Kinds of storages whose studies are kept open. Not SQLite: a new study may get the number of a
deleted one, and a reader that had kept the old one open would mistake the new one for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A study that exists, before it is read; `storage` as for `KnownStudy`."""

    folder: Path
    storage: str
    stamp: str
    changed_s: float


class StudyReader:
    """Reads studies, one after another.

    Args:
      storage: as for `--storage` of the searches; empty for SQLite in each study's folder.
    """

    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._place: Storage | None = parse_storage(storage, Path()) if storage else None
        self._backend: Backend | None = None
        # Open studies whose searches run: their finished trials are not read again.
        self._open: OrderedDict[str, Study] = OrderedDict()

    def close(self) -> None:
        self._open.clear()
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def read(self, name: str, found: Found) -> KnownStudy:
        """Returns a study as it is now; if it cannot be read, the result says why."""
        try:
            result, is_running = self._read_result(name, found)
            summary = summary_of(name, result, is_running=is_running)
            rule, missing = rule_or_reason(result)
            known = _known(replace(summary, changed_s=found.changed_s), found, rule, missing)
            message = to_message(known)
            # A message that is too long must not end the conversation about all other studies.
            packed({"study": message})
            from_message(message, self._storage)  # reads it as the server will
        except Exception as error:  # noqa: BLE001  One broken study must not hide the others.
            return unreadable(name, found, reason_of(error))
        return known

    def _read_result(self, name: str, found: Found) -> tuple[SearchResult, bool]:
        """Returns the contents of a study now, and whether a search runs."""
        lent = self._lent() if found.storage else None
        if lent is None:
            folder = found.folder
            # Files from submitted code or an agent are never opened in place, but as copies.
            opened = reading(folder, results=folder.parent, storage=found.storage, in_place=False)
            with opened as (_, study, header):
                study.freeze()
                return assemble(study, header), study.leader() is not None
        kept = self._open.pop(name, None)
        if kept is not None:
            try:
                return self._read_open(name, kept, found)
            except Exception:  # noqa: BLE001  The study may have been removed, and made anew.
                self._open.pop(name, None)
        lent_study = open_study(lent.storage, name, create=False, backend=lent)
        return self._read_open(name, lent_study, found)

    def _lent(self) -> Backend | None:
        """Returns the storage for a study that is kept open; None if studies of its kind are not
        kept open."""
        if self._place is None or self._place.kind not in _KEPT_OPEN:
            return None
        self._backend = self._backend or open_backend(self._place)
        return self._backend.lent()

    def _read_open(self, name: str, study: Study, found: Found) -> tuple[SearchResult, bool]:
        study.freeze()
        result = assemble(study, header_in(study, found.folder))
        is_running = study.leader() is not None
        if is_running and study.storage.kind in _KEPT_OPEN:
            self._open[name] = study
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return result, is_running


def _known(summary: StudySummary, found: Found, rule: str, missing: str) -> KnownStudy:
    return known_of(
        summary,
        folder=found.folder,
        storage=found.storage,
        rule=rule,
        missing=missing,
        stamp=found.stamp,
    )


def rule_or_reason(result: SearchResult) -> tuple[str, str]:
    """Returns the text of the rule file, or why there is none."""
    try:
        return rule_text(result), ""
    except NoFeasibleMesh as error:
        return "", error.message
    except AutomeshError as error:
        return "", error.message


def summary_of(name: str, result: SearchResult, *, is_running: bool) -> StudySummary:
    """Returns the summary of a study for a list."""
    best, funnel = words.best_of(result), result.funnel
    last = result.verifications[-1] if result.verifications else None
    state: State = "interrupted" if result.footer.interrupted else "ended"
    if result.footer.stop_reason == NOT_ENDED:
        state = "stopped"
    return StudySummary(
        name=name,
        workload=clean(result.facts.searched.workload),
        target=clean(result.facts.devices.target),
        device=clean(result.facts.devices.kind),
        device_count=result.facts.devices.count,
        state="running" if is_running else state,
        sentence=clean(words.best_sentence(result) or ""),
        evidence=words.evidence(best) if best is not None else "none",
        plan=str(best.plan) if best is not None else "",
        step_s=_finite(words.step_s(best)) if best is not None else None,
        speedup=_finite(last.speedup) if last is not None and last.baseline else None,
        legal=funnel.legal,
        compiled=funnel.compiled + funnel.duplicates,
        measured=funnel.measured,
        failed=funnel.failed + funnel.out_of_memory + funnel.timed_out,
        waiting=funnel.waiting,
        has_rule=_has_rule(result),
        made=result.footer.made,
        stop_reason=clean(result.footer.stop_reason),
    )


def _finite(figure: float | None) -> float | None:
    """Returns a figure that JSON can represent, or None. A single NaN would break the list of all
    studies."""
    return figure if figure is not None and math.isfinite(figure) else None


def _has_rule(result: SearchResult) -> bool:
    try:
        rule_of(result)
    except AutomeshError:
        return False
    return True


def unreadable(name: str, found: Found, reason: str) -> KnownStudy:
    """Returns a study that could not be read."""
    summary = StudySummary(name=name, changed_s=found.changed_s, state="unreadable", problem=reason)
    return _known(summary, found, "", reason)
