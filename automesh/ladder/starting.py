"""Where every search begins: its target and its space are read, and it is sent on its way."""

from __future__ import annotations

import os

from automesh.errors import UsageError
from automesh.hardware import parse_target, running_under_several_processes
from automesh.ladder.request import SearchRequest
from automesh.results.progress import Progress
from automesh.results.result import SearchResult
from automesh.space.spec import read_space


def start(request: SearchRequest, progress: Progress) -> SearchResult:
    """Runs a search, or only its estimates.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    several = running_under_several_processes(os.environ)
    if several:
        raise UsageError(
            f"this is one of several processes ({several}), but a search runs in a single one",
            hint="run the search on one host, without the launcher",
        )
    target = parse_target(request.target, os.environ)
    space = read_space(request.space)
    if request.dry_run:
        from automesh.ladder.dry_run import estimate_only

        return estimate_only(request, target, space, progress)
    # Optuna, SQLAlchemy and SciPy take a second to import, which a dry run does without.
    from automesh.ladder.run import run_search

    return run_search(request, target, space, progress)
