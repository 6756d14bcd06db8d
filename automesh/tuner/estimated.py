"""The ranking by estimates: stored in the study from the first estimate on, and the result of a
search that is stopped before its first compile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from automesh.hardware import Target
from automesh.jsonio import to_json
from automesh.report.estimates import ESTIMATES, Estimates
from automesh.report.files.csv import write_estimates
from automesh.report.result import Candidate, Footer, SearchResult
from automesh.report.so_far import SoFar
from automesh.report.words import count, is_ranked
from automesh.tuner.choose.ranking import WIDE, estimated_candidates, hardly_fits
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.carried import with_starts
from automesh.tuner.study.metadata import Header, Notebook, header_of, notebook_of
from automesh.tuner.study.results import nothing_tried, result_of
from automesh.tuner.study.study import Study
from automesh.units import format_bytes

INTERRUPTED = "interrupted"
NOT_BUILT = "whether the step can be built on the meshes that are listed is not known yet"
_NOTE = "ranking"
_ROWS = 64  # rows that a study stores
_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class RankingKeeper:
    """Stores the ranking in the study while estimates are made: the first one, then one every few
    seconds. So a running or killed search can be shown.

    A study with trials keeps the notes of its last search, which have more information.
    """

    request: SearchRequest
    target: Target
    preparation: Preparation
    legal: LegalPlans
    study: Study
    clock: Callable[[], float] = time.monotonic
    _kept_s: float = field(init=False, default=-math.inf)
    _has_trials: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        rungs = (self.study.compile, self.study.measure)
        self._has_trials = any(rung.trials() for rung in rungs)

    def __call__(self, so_far: SoFar) -> None:
        """Stores a table, unless another was stored just before."""
        now_s = self.clock()
        if self._has_trials or now_s - self._kept_s < _EVERY_S:
            return
        self._kept_s = now_s
        header = replace(self._header(self.legal, Estimates()), estimated=so_far.estimated)
        notebook = notebook_of(self.study, header)
        notebook.note_header(header)
        _note(notebook, so_far)

    def ranked(self, legal: LegalPlans, estimates: Estimates, *, stop_reason: str) -> SearchResult:
        """Returns the result of a search that ends with its estimates; keeps it in the study.

        Args:
          legal: the plans that can be built.
          stop_reason: why the search ends; used only if Ctrl-C did not stop the estimates.
        """
        header = with_starts(self._header(legal, estimates), self.request.entry)
        facts = header.facts
        limit_bytes = facts.devices.memory_bytes
        large = sum(hardly_fits(one, limit_bytes) for one in estimates.found.values())
        reason = INTERRUPTED if estimates.is_interrupted else stop_reason
        candidates = keep_ranking(header, estimates, self.study, stop_reason=reason)
        write_estimates(estimates, self.preparation.folder / ESTIMATES)
        # Without a compile the memory is not certain.
        unbounded = replace(facts, devices=replace(facts.devices, memory_bytes=0, reserve_bytes=0))
        return replace(
            result_of(header, candidates, nothing_tried(header)),
            facts=unbounded,
            footer=Footer(
                stop_reason=reason,
                rules_path="",
                interrupted=estimates.is_interrupted,
                made=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
            notices=(*facts.notices, *_large_notice(large, limit_bytes)),
            is_ahead=False,
        )

    def _header(self, legal: LegalPlans, estimates: Estimates) -> Header:
        return header_of(
            self.request,
            self.preparation,
            legal,
            self.study,
            estimates=estimates,
            is_ahead=self.target.absent is not None,
        )


def keep_ranking(
    header: Header, estimates: Estimates, study: Study, *, stop_reason: str = ""
) -> tuple[Candidate, ...]:
    """Ranks all estimates, and stores the header and the first ones in the study."""
    candidates = estimated_candidates(
        estimates.found,
        baseline=header.baseline,
        device_memory_bytes=header.facts.devices.memory_bytes,
    )
    behind = (one for one in candidates[_ROWS:] if one.is_baseline)
    notebook = notebook_of(study, header)
    notebook.note_header(header)
    so_far = SoFar(
        rows=(*candidates[:_ROWS], *behind),
        estimated=len(candidates),
        plans=header.plans,
        stop_reason=stop_reason,
    )
    _note(notebook, so_far)
    return candidates


def with_estimates(result: SearchResult, study: Study, header: Header) -> SearchResult:
    """Returns a result with the ranking that its study has stored, if it has no ranked plan of its
    own."""
    if any(map(is_ranked, result.candidates)) or header.facts.searched.template:
        return result
    so_far: SoFar | None = notebook_of(study, header).read(_NOTE, SoFar)
    if so_far is None:
        return result
    # A search with another space had other legal plans; plans that failed since then are in the
    # result.
    outside = frozenset(header.outside) | {str(one.plan) for one in result.candidates}
    rows = [row for row in so_far.rows if str(row.plan) not in outside]
    if not rows:
        return result
    rows = [replace(row, is_scripts=not header.facts.searched.arguments) for row in rows]
    footer = result.footer
    if so_far.stop_reason and not footer.made:
        is_interrupted = so_far.stop_reason == INTERRUPTED
        footer = replace(footer, stop_reason=so_far.stop_reason, interrupted=is_interrupted)
    return replace(
        result,
        candidates=(*rows, *result.candidates),
        footer=footer,
        is_ahead=result.is_ahead and bool(result.candidates),
    )


def _note(notebook: Notebook, so_far: SoFar) -> None:
    notebook.note(_NOTE, to_json(so_far, SoFar))


def _large_notice(large: int, limit_bytes: int) -> tuple[str, ...]:
    if not large:
        return ()
    return (
        f"{count(large, 'plan')} ranked last: estimated to need more than {WIDE:g} times the "
        f"{format_bytes(limit_bytes)} of a device",
    )
