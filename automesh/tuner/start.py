"""The start of every search: reads its target and space, and chooses how to search."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from automesh.errors import UsageError
from automesh.hardware import (
    Target,
    check_compilable,
    clusters_in,
    parse_target,
)
from automesh.hardware.reserve import default_reserve
from automesh.launch.cluster import ENGINES, spread
from automesh.program.capture.nouns import Capture
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.space.curated import CURATED, curated_for
from automesh.space.options import with_options
from automesh.space.space import Knob, SearchSpace
from automesh.tuner.choose.affordable import short_budget_notice
from automesh.tuner.choose.baseline import check_baseline
from automesh.tuner.command.timed_command import TimedCommand
from automesh.tuner.paths import check_places
from automesh.tuner.preparation import known_devices
from automesh.tuner.request import SearchRequest, usual_top
from automesh.tuner.script.capture import space_for
from automesh.tuner.workers import bounded_workers, refuse_launcher


def start(request: SearchRequest, progress: Progress) -> SearchResult:
    """Runs a search, by a script or a command, or only its estimates.

    Raises:
      UsageError: the input is wrong.
      NoFeasibleMesh: no plan is legal.
    """
    if isinstance(request.subject, TimedCommand):
        from automesh.tuner.command.start import search_command

        return search_command(request, progress)
    begun_s = time.monotonic()
    request, target, space = read_aim(request, progress, check=_check_at_once)
    if (capture := request.entry.capture) is not None:
        request = replace(request, used_s=time.monotonic() - begun_s)
        request = _told_of_budget(request, target, progress, capture)
    check_baseline(request.baseline.strip(), names=space.names, devices=known_devices(target))
    if not request.top:
        request = replace(request, top=usual_top(is_ahead=target.absent is not None))
    if request.dry_run:
        from automesh.tuner.dry_run import estimate_only

        return estimate_only(request, target, space, progress)
    # Optuna, SQLAlchemy and SciPy take a second to import, and a dry run does not need them.
    from automesh.tuner.run import run_search

    return run_search(request, target, space, progress)


def _told_of_budget(
    request: SearchRequest, target: Target, progress: Progress, capture: Capture
) -> SearchRequest:
    """Warns at once if the budget is too small, after a script was run up to its step."""
    if request.dry_run or target.absent is not None:
        return request
    told = short_budget_notice(
        request.entry,
        start_s=capture.start_s,
        left_s=request.budget_s - request.used_s,
        used_s=request.used_s,
    )
    if not told:
        return request
    progress.notice(told)
    return replace(request, notices=(*request.notices, told))


def read_aim(
    request: SearchRequest,
    progress: Progress,
    *,
    check: Callable[[SearchRequest, Target], object] | None = None,
    alone: str = "",
) -> tuple[SearchRequest, Target, SearchSpace]:
    """Reads the target and the search space of a request.

    Args:
      alone: see `space_for`.
      check: is called before a script without `build` is run for its mesh, and raises for a request
        that it refuses.

    Returns:
      The request, which a script without `build` completes; the target; the space.

    Raises:
      UsageError: one of them cannot be read, or this is one of several processes.
    """
    if not (request.cluster.is_everywhere or request.cluster.launch in ENGINES):
        refuse_launcher("a search", hint="run the search on one host, without the launcher")
    target = parse_target(request.target, os.environ, clusters_in(request.hardware))
    target = spread(target, request.cluster)
    elsewhere = request.cluster.listen or request.cluster.launch in ENGINES
    is_shared = target.processes > 1 or target.absent is not None
    if elsewhere and is_shared and request.entry.kind == "pickle":
        raise UsageError(
            "a function lies in a file of this host, which agents on other hosts cannot read",
            hint="put it into a script under the same path on all hosts, and search that",
        )
    if target.absent is not None and not request.reserve:
        # Checked before a worker is waited for.
        default_reserve(target.absent.platform, os.environ)
    options = _options(request, target)
    if check is not None:
        check(request, target)
    request = _with_workers(request, target, progress)
    request, target, space = space_for(request, target, progress, alone=alone)
    return request, target, with_options(space, options)


def _check_at_once(request: SearchRequest, target: Target) -> None:
    """Makes all checks that need no worker, before one is started."""
    if not request.dry_run:
        check_compilable(target)
    check_places(request)
    check_baseline(request.baseline.strip(), devices=known_devices(target))


def _with_workers(request: SearchRequest, target: Target, progress: Progress) -> SearchRequest:
    workers, notice = bounded_workers(
        target, request.workers, memory_limit_bytes=request.memory_limit_bytes
    )
    if not notice:
        return request
    progress.notice(notice)
    return replace(request, workers=workers, notices=(*request.notices, notice))


def _options(request: SearchRequest, target: Target) -> tuple[Knob, ...]:
    """Returns the compiler options of the command line; they replace curated ones of the same
    name."""
    if not request.curated:
        return request.xla
    absent = target.absent
    if absent is None:
        raise UsageError(
            f"`--xla {CURATED}` is for devices that a target names, and `{target.name}` does not "
            "say of which kind they are",
            hint="name the options to try: `--xla NAME=default,VALUE`",
        )
    chip, granules = absent.fabric.chip, absent.fabric.num_granules
    named = {knob.name for knob in request.xla}
    curated = curated_for(absent.platform, chip.slug, granules)
    return (*request.xla, *(knob for knob in curated if knob.name not in named))
