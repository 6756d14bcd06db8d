"""Presets that do not fit as published: the same step in more microbatches, until they do.

Experts keep some activations, or move them to the host, where the examples recompute whole layers
and hold their inputs; and the compilers are told to leave some memory free. A mesh that was trained
on may then not fit. Rows are accumulated then, in the same way for the expert's mesh and for all
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from automesh.errors import AutomeshError
from automesh.mesh.axes import parse_mesh
from benchmarks.experts.presets import Expert
from benchmarks.experts.study import Row

# Times the microbatches of the preset; beyond, the step is another.
_MOST = 8
# Axes that split the rows in one of the examples.
_ROWS = ("dp", "fsdp", "ep")


def fitted(expert: Expert, study: Callable[[Expert], Row]) -> Row:
    """The row of a preset; of one that does not fit, with the microbatches with which it does.

    Args:
      study: compares the expert's mesh with ours, at the expert's microbatches.

    Returns:
      As published if more microbatches do not help; `accumulated` says what was tried.
    """
    published = row = study(expert)
    tried = expert
    at_once = (
        f"with microbatches={expert.microbatches} the expert's mesh {published.expert.verdict}"
    )
    while not row.expert.fits and (more := accumulated(tried, most=_MOST * expert.microbatches)):
        try:
            tried, row = more, study(more)
        except (AutomeshError, RuntimeError) as error:
            said = f"{more.microbatches} cannot be compared: {error}"
            return replace(published, accumulated=f"{at_once}; {said}")
    if tried is expert:
        return published
    if not row.expert.fits:
        said = f"nor does it with {tried.microbatches}: {row.expert.verdict}"
        return replace(published, accumulated=f"{at_once}; {said}")
    said = f"here {tried.microbatches} microbatches are accumulated, by both"
    return replace(row, id=expert.id, accumulated=f"{at_once}; {said}")


def accumulated(expert: Expert, *, most: int) -> Expert | None:
    """The preset with at least twice the microbatches; None if its rows cannot be split further."""
    sizes = {axis.name: axis.ici * axis.dcn for axis in parse_mesh(expert.mesh)}
    degree = math.prod(sizes.get(name, 1) for name in _ROWS)
    rows = int(expert.argv[expert.argv.index("--rows") + 1])
    for microbatches in range(2 * expert.microbatches, most + 1):
        if rows % (degree * microbatches) == 0:
            name = expert.id.removesuffix(f"-m{expert.microbatches}")
            return replace(expert, id=f"{name}-m{microbatches}", microbatches=microbatches)
    return None
