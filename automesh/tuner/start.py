"""The start of every search: reads its target and space, and chooses how to search."""

from __future__ import annotations

import os
from dataclasses import replace

from automesh.errors import UsageError
from automesh.hardware import (
    Target,
    check_compilable,
    clusters_in,
    parse_target,
)
from automesh.hardware.reserve import default_reserve
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.space.curated import CURATED, curated_for
from automesh.space.options import with_options
from automesh.space.space import Knob, SearchSpace
from automesh.tuner.capture import space_for
from automesh.tuner.command.timed_command import TimedCommand
from automesh.tuner.request import SearchRequest, usual_top
from automesh.tuner.workers import refuse_launcher


def start(request: SearchRequest, progress: Progress) -> SearchResult:
    """Runs a search, by a script or a command, or only its estimates.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    if isinstance(request.subject, TimedCommand):
        from automesh.tuner.command.start import search_command

        return search_command(request, progress)
    request, target, space = read_aim(request, progress)
    if not request.top:
        request = replace(request, top=usual_top(is_ahead=target.absent is not None))
    if request.dry_run:
        from automesh.tuner.dry_run import estimate_only

        return estimate_only(request, target, space, progress)
    check_compilable(target)
    # Optuna, SQLAlchemy and SciPy take a second to import, which a dry run does without.
    from automesh.tuner.run import run_search

    return run_search(request, target, space, progress)


def read_aim(
    request: SearchRequest, progress: Progress
) -> tuple[SearchRequest, Target, SearchSpace]:
    """Reads the target and the search space of a request.

    Returns:
      The request, which a script without `build` completes; the target; the space.

    Raises:
      UsageError: one of them cannot be read, or this is one of several processes.
    """
    refuse_launcher("a search", hint="run the search on one host, without the launcher")
    target = parse_target(request.target, os.environ, clusters_in(request.hardware))
    if target.absent is not None and not request.reserve:
        default_reserve(target.absent.platform, os.environ)  # Before a worker is waited for.
    request, space = space_for(request, target, progress)
    return request, target, with_options(space, _options(request, target))


def _options(request: SearchRequest, target: Target) -> tuple[Knob, ...]:
    """The compiler options of the command line; what is named there replaces what is curated."""
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
