"""Searches for several targets, one after the other; each search uses the results of the earlier
ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from automesh.errors import AutomeshError, NoFeasibleMesh, UsageError, of_system
from automesh.hardware import check_compilable, clusters_in, parse_target
from automesh.report.files.rule import rule_of
from automesh.report.pages.several import Several, Sought
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.words import best_of
from automesh.tuner.estimate.terms_cache import TERMS
from automesh.tuner.request import SearchRequest
from automesh.tuner.start import start

# Least share, of an even part of the budget, that a target gets after others took longer.
_LEAST = 0.5


def start_all(
    request: SearchRequest,
    targets: Sequence[str],
    open_progress: Callable[[], Progress],
    *,
    on_each: Callable[[SearchResult], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Several:
    """Runs a search for each target: each gets a study and a rule, and all share one budget.

    Args:
      request: the request; its target is ignored.
      open_progress: opens a new display for each search.
      on_each: gets each result as soon as it is there, behind its display.

    Raises:
      UsageError: a text is no target, or is given twice, or names devices that cannot be compiled
        for; then nothing has run.
    """
    _check(request, targets)
    began_s, even_s = clock(), request.budget_s / len(targets)
    searches: list[Sought] = []
    folders: list[Path] = []
    interrupted = False
    for number, target in enumerate(targets):
        left_s = request.budget_s - (clock() - began_s)
        share_s = max(left_s / (len(targets) - number), _LEAST * even_s)
        mine = replace(request, target=target, budget_s=share_s, shared_terms=tuple(folders))
        try:
            with open_progress() as progress:
                progress.log(f"target {number + 1} of {len(targets)}: {target}")
                one = _sought(mine, target, progress)
        except KeyboardInterrupt:
            # Interrupted before it had a result; the results of the other targets are shown in any
            # case.
            if not searches:
                raise
            interrupted = True
            break
        searches.append(one)
        if one.result is None:
            continue
        try:
            on_each(one.result)
        except KeyboardInterrupt:
            interrupted = True
            break
        if one.result.facts.provenance.results_dir:
            folders.append(Path(one.result.facts.provenance.results_dir).absolute() / TERMS)
        if one.result.footer.interrupted:
            interrupted = True
            break
    left = targets[len(searches) :]
    searches += [Sought(target=one, result=None, reason="it was not begun") for one in left]
    return Several(searches=tuple(searches), interrupted=interrupted)


def _check(request: SearchRequest, targets: Sequence[str]) -> None:
    clusters = clusters_in(request.hardware)
    parsed = [parse_target(target, os.environ, clusters) for target in targets]
    known: dict[str, str] = {}
    for target in parsed:
        selector = target.selector or target.name
        if selector in known:
            raise UsageError(
                f"`{target.name}` and `{known[selector]}` are the same target",
                hint="name each target once",
            )
        known[selector] = target.name
        if not request.dry_run:
            check_compilable(target)


def _sought(request: SearchRequest, target: str, progress: Progress) -> Sought:
    """Runs one search; its failure ends only the search for this target."""
    try:
        result = start(request, progress)
    except AutomeshError as error:
        return Sought(target=target, result=None, reason=error.message, hint=error.hint)
    except OSError as error:
        refused = of_system(error)
        return Sought(target=target, result=None, reason=refused.message, hint=refused.hint)
    return _judged(result, target, is_dry=request.dry_run)


def _judged(result: SearchResult, target: str, *, is_dry: bool) -> Sought:
    if is_dry:
        reason = "" if best_of(result) else "no plan could be estimated"
        return Sought(target=target, result=result, reason=reason)
    try:
        rule_of(result)
    except NoFeasibleMesh as error:
        return Sought(target=target, result=result, reason=error.message, hint=error.hint)
    return Sought(target=target, result=result)
