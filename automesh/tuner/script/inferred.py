"""A script without a mesh: the search varies meshes together with the dimensions split over
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.limits import STORED_STEP_BYTES
from automesh.mesh.rules.shardings import path_of
from automesh.program.capture.nouns import Discovery
from automesh.program.infer.search.layout import DP, TP, Layout, lay_out
from automesh.report.progress import Progress
from automesh.report.words import count
from automesh.space.space import AxisRange, SearchSpace
from automesh.tuner.preparation import known_devices
from automesh.tuner.request import SearchRequest
from automesh.units import format_bytes

SPACE = "inferred"
_MOST_TP = 16


def inferred(
    request: SearchRequest,
    target: Target,
    found: Discovery,
    progress: Progress,
    said: tuple[str, ...],
) -> tuple[SearchRequest, Target, SearchSpace]:
    """Returns the search space of a script whose step is for one device; the result is as for
    `space_for`.

    Args:
      said: notices for the user about its first run.

    Raises:
      UsageError: no dimension can be split, the step cannot be stored, or an option needs a mesh.
    """
    name, classes, mesh = Path(request.entry.location).name, found.classes, _mesh_of(found)
    assert classes is not None
    if request.splits:
        raise UsageError(
            f"`--split {request.splits[0]}` divides an axis of the step's mesh, but {name} {mesh}",
            hint="leave `--split` out",
        )
    if request.space != "auto":
        raise UsageError(
            f"{name} {mesh}, so that no array has axes of the space `{request.space}`",
            hint="leave `--space` out: the axes are inferred",
        )
    if found.not_carried:
        raise UsageError(
            f"{name} {mesh}, and its step {found.capture.step.in_short()} cannot be taken "
            f"to one: {found.not_carried}",
            hint="write a function `build(mesh)` that returns the step and its arguments",
        )
    is_measured = target.absent is None and not request.dry_run
    if is_measured and found.capture.step.argument_bytes > STORED_STEP_BYTES:
        raise UsageError(
            f"the arguments of the step of {name} have "
            f"{format_bytes(found.capture.step.argument_bytes)}, and up to "
            f"{format_bytes(STORED_STEP_BYTES)} are kept to measure it on other meshes",
            hint="estimate it with `--dry-run`, compile it for devices that are named, "
            "`--target tpu-v5p-16`, or write a function `build(mesh)`",
        )
    devices, granules = known_devices(target)
    layout = lay_out(
        classes,
        num_devices=devices or found.num_devices,
        num_granules=granules or 1,
        script=name,
        mesh=mesh,
    )
    capture = replace(found.capture, layout=layout).stored("trace")
    notices = (*_notices(found, layout), *said)
    for notice in notices:
        progress.notice(notice)
    entry = replace(request.entry, function=capture.step.name, capture=capture)
    baseline = request.baseline or _data_parallel(
        layout, devices or found.num_devices, granules or 1
    )
    request = replace(
        request,
        subject=entry,
        baseline=baseline,
        notices=(*request.notices, *notices),
    )
    return request, target, _space(layout)


def _space(layout: Layout) -> SearchSpace:
    return SearchSpace(
        name=SPACE,
        shipped=True,
        names=layout.axes,
        axes=tuple(
            AxisRange(name=axis, dcn=axis in layout.slow, maximum=_MOST_TP if axis == TP else 0)
            for axis in layout.axes
        ),
        batch_axes=layout.batch_axes,
        mapping=layout.logical,
    )


def _data_parallel(layout: Layout, devices: int, granules: int) -> str:
    """Returns the mapping that splits the batch over all devices, the usual first try; empty if
    they do not divide it."""
    if DP not in layout.axes or layout.batch_parts % devices:
        return ""
    parts = [f"dcn.{DP}:{granules}"] if granules > 1 else []
    each = devices // granules
    return ",".join([*parts, f"{DP}:{each}"] if each > 1 else parts)


def _listed_roots(layout: Layout) -> str:
    roots = dict.fromkeys(path_of(one.name).partition("/")[0] for one in layout.arguments)
    return " and ".join(f"`{root}`" for root in roots)


def _mesh_of(found: Discovery) -> str:
    """Says which mesh the script has, in the words after its name."""
    unused = found.unused_mesh
    if unused is None:
        return "makes no mesh"
    return f"makes the mesh {unused} ({unused.made_at}), and no array of its step is on it"


def _notices(found: Discovery, layout: Layout) -> tuple[str, ...]:
    step = found.capture.step
    said = [
        f"the script {_mesh_of(found)}; it was run up to its step {step.in_words()} with "
        f"{format_bytes(step.argument_bytes)} of arguments, which is searched for several devices "
        f"with {count(layout.mappings, 'mapping')} of its dimensions to mesh axes"
    ]
    if step.doubt:
        said.append(
            f"`{step.name}` may not be the step: {step.doubt}; `--step NAME` chooses another"
        )
    if outside := step.about_outside():
        said.append(outside)
    if step.loop is not None:
        said.append(
            f"the shardings of the rule are for one turn of the loop at {step.loop.at}: to use "
            "them with `config.apply`, jit the turn as a function of its own, whose parameters "
            f"are called {_listed_roots(layout)}"
        )
    if not step.carried and not step.outside:
        said.append(
            f"no output of `{step.name}` comes back as its argument: every step is measured from "
            "the same state; `--step NAME` chooses another function"
        )
    cautions = [] if found.classes is None else [one.text for one in found.classes.cautions]
    return (*said, *layout.notices, *cautions, *found.notices)
