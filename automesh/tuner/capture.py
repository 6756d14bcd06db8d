"""A script without `build`: its first run tells what is searched, and what it is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.outcomes import Failure
from automesh.program.capture.nouns import (
    AxisSplit,
    Capture,
    Discovery,
    ScriptStep,
    check_splits,
    names_in_place,
)
from automesh.report.progress import Progress
from automesh.report.words import count
from automesh.space.space import AxisRange, SearchSpace
from automesh.space.spec import read_space
from automesh.tuner.preparation import step_ref
from automesh.tuner.request import UNMODIFIED, SearchRequest
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import ask, one_worker, refuse_gang, surroundings_of
from automesh.units import format_bytes
from automesh.worker.messages import DiscoverJob

# A space of a name that no file has: the axes are the script's own.
_OWN_AXES = "auto"


def check_capture_options(request: SearchRequest) -> None:
    """Sees to it that what only scripts without `build` need is said of no other.

    Raises:
      UsageError: it is.
    """
    if request.entry.function == UNMODIFIED:
        return
    given = [f"--step {request.step}"] if request.step else []
    given += [f"--split {split}" for split in request.splits]
    for option in given:
        raise UsageError(
            f"`{option}` is for scripts without a function `build`",
            hint=f"name a function with `{Path(request.entry.location).name}:FUNCTION`",
        )


def space_for(
    request: SearchRequest, target: Target, progress: Progress
) -> tuple[SearchRequest, SearchSpace]:
    """The search space of a request; for a script without `build`, after its first run.

    Returns:
      The request, which knows then how the script is run up to its step, with its own mesh as the
      baseline; and the space: the script's own axes, unless another one is named.

    Raises:
      UsageError: bad input; or the script has no mesh or no step that is seen, or fails.
    """
    check_capture_options(request)
    if request.entry.function != UNMODIFIED:
        return request, read_space(request.space)
    found = _discovered(request, target, progress)
    check_splits(request.splits, found.capture.mesh)
    found = _with_splits(found, request.splits)
    space = _space(request, found)
    capture = found.capture
    entry = replace(request.entry, function=capture.step.name, capture=capture)
    notices = _notices(found, space)
    for notice in notices:
        progress.notice(notice)
    return (
        replace(
            request,
            subject=entry,
            baseline=request.baseline or _baseline(found),
            notices=(*request.notices, *notices),
        ),
        space,
    )


def _baseline(found: Discovery) -> str:
    """The script's own mesh; nothing if it is made of fewer devices than there are."""
    searched = found.capture.searched
    if searched.num_devices != found.num_devices:
        return ""
    own = [(name, size) for name, size in searched.axes if size > 1]
    return ",".join(f"{name}:{size}" for name, size in own) or f"{searched.names[0]}:1"


def _with_splits(found: Discovery, splits: tuple[AxisSplit, ...]) -> Discovery:
    into = names_in_place(splits)
    batch = [part for name in found.batch_axes for part in into.get(name, (name,))]
    capture = replace(found.capture, splits=splits)
    return replace(found, capture=capture, batch_axes=tuple(batch))


def _discovered(request: SearchRequest, target: Target, progress: Progress) -> Discovery:
    refuse_gang(target, "a script without `build`")
    name = Path(request.entry.location).name
    progress.now(f"{name} has no function `build`: running it up to its training step")
    job = DiscoverJob(step=step_ref(request.entry, target), wanted=request.step)
    with one_worker(
        surroundings_of(target), memory_limit_bytes=request.memory_limit_bytes, progress=progress
    ) as pool:
        answer = ask(pool, job, Discovery, request.timeout_s)
    if isinstance(answer, Failure):
        raise inspection_error(answer, request.entry)
    return answer


def _space(request: SearchRequest, found: Discovery) -> SearchSpace:
    names = found.capture.searched.names
    if request.space != _OWN_AXES:
        space = read_space(request.space)
        if set(space.names) != set(names):
            raise UsageError(
                f"the space `{request.space}` has the axes {', '.join(space.names)}, but the mesh "
                f"of {Path(request.entry.location).name} ({found.capture.mesh.made_at}) has "
                f"{', '.join(names)}",
                hint="leave `--space` out to search over the script's own axes",
            )
        if space.knobs:
            raise UsageError(
                f"the space `{request.space}` has knobs, and a script without `build` takes none",
                hint="remove [knobs], or write a function `build(mesh, remat=...)`",
            )
        return replace(space, names=names)
    slow = found.batch_axes or names
    return SearchSpace(
        name=_OWN_AXES,
        shipped=True,
        names=names,
        axes=tuple(AxisRange(name=name, dcn=name in slow) for name in names),
        batch_axes=found.batch_axes,
    )


def _notices(found: Discovery, space: SearchSpace) -> tuple[str, ...]:
    capture = found.capture
    step, mesh = capture.step, capture.mesh
    said = [
        f"the script was run up to its step {step.in_words()} with "
        f"{format_bytes(step.argument_bytes)} of arguments; its mesh {mesh} is made at "
        f"{mesh.made_at}: make that one from the rule to use what is found"
    ]
    if step.doubt:
        others = ", ".join(f"`{other.name}`" for other in found.other_steps[:3])
        named = f", among {others}" if others else ""
        said.append(
            f"`{step.name}` may not be the step: {step.doubt}; `--step NAME` chooses another "
            f"function{named}"
        )
    if outside := step.about_outside():
        said.append(outside)
    if mesh.num_devices != found.num_devices:
        said.append(
            f"the script's mesh is made of {mesh.num_devices} of {found.num_devices} devices, so "
            "others are not compared with it; name one that has them all with `--baseline`"
        )
    said += [_about_split(split, capture) for split in capture.splits]
    if not step.carried and not step.outside:
        said.append(
            f"no output of `{step.name}` comes back as its argument: every step is measured from "
            "the same state; `--step NAME` chooses another function"
        )
    if found.other_steps:
        listed = ", ".join(_share(other, found) for other in found.other_steps[:3])
        more = len(found.other_steps) - 3
        listed += f" and {more} more" if more > 0 else ""
        said.append(f"called besides, and not searched: {listed}; `--step NAME` searches another")
    if found.other_meshes:
        others = ", ".join(
            f"{other_mesh} ({other_mesh.made_at})" for other_mesh in found.other_meshes[:3]
        )
        said.append(f"the script makes other meshes, which stay as they are: {others}")
    slow = [axis.name for axis in space.axes if axis.dcn]
    if space.name == _OWN_AXES and len(slow) < len(space.axes):
        listed = ", ".join(f"`{name}`" for name in slow)
        said.append(f"only {listed}, over which the batch is split, may span slices or nodes")
    return (*said, *found.notices)


def _share(other: ScriptStep, found: Discovery) -> str:
    """A function that is not searched, and how much of the script's work was its own."""
    every = [found.capture.step, *found.other_steps]
    total = sum(step.flops * step.calls for step in every)
    share = other.flops * other.calls / total if total else 0.0
    return (
        f"`{other.name}` ({other.called_at}; {count(other.calls, 'call')}, "
        f"{format_bytes(other.argument_bytes)}, {share:.0%} of the work up to here)"
    )


def _about_split(split: AxisSplit, capture: Capture) -> str:
    """What a split does, and what to write in the script to have it."""
    names = ", ".join(f'"{name}"' for name in split.into)
    first, *rest = split.into
    state = " and ".join(f"`{name}`" for name in rest)
    written = f'write P(({names})) for P("{split.axis}") in the script'
    if "explicit" in capture.mesh.axis_types:
        return (
            f"what the script splits over `{split.axis}` is split over {names}; its arrays say in "
            "their types (Explicit axes) how they are split, so no other array is split: all "
            f"divisions among them do the same; to use it, {written}"
        )
    return (
        f"what the script splits over `{split.axis}` is split over {names}, and the state that it "
        f"leaves whole is split over {state}, each array along its largest dimension; with "
        f"`{first}` alone the step does what the script does; to use what is found, {written}, and "
        f"put its state on NamedSharding(mesh, P(..., {names.partition(', ')[2]}))"
    )
