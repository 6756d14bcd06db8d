"""A script without `build`: its first run tells what is searched, and what it is compared with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.hardware import Target, parse_target
from automesh.mesh.axes import is_usual_model_axis
from automesh.outcomes import Failure, OutOfMemory, TimedOut
from automesh.platforms.allowed import limits_hint
from automesh.program.capture.line_watch import last_line
from automesh.program.capture.nouns import (
    AxisSplit,
    Capture,
    Discovery,
    OtherDevices,
    ScriptStep,
    Sizes,
    check_splits,
    names_in_place,
)
from automesh.program.nouns import Entry
from automesh.report.progress import Progress
from automesh.report.words import count
from automesh.space.space import AxisRange, SearchSpace
from automesh.space.spec import read_space
from automesh.tuner.preparation import step_ref
from automesh.tuner.request import UNMODIFIED, SearchRequest
from automesh.tuner.script.around import check_around, searched_around
from automesh.tuner.script.carried import carried, surroundings_naming
from automesh.tuner.script.inferred import inferred
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import one_worker, refuse_gang, surroundings_of
from automesh.units import format_bytes
from automesh.worker.messages import DiscoverJob, Surroundings
from automesh.worker.temporary import folder_until_exit

# A space of a name that no file has: the axes are the script's own.
_OWN_AXES = "auto"
# Names for the parts of an axis that splits the batch.
_PARTS = ("dp", "fsdp", "shard")


def check_capture_options(request: SearchRequest) -> None:
    """Refuses options that only scripts without `build` need, such as `--step`, for any other.

    Raises:
      UsageError: it is.
    """
    if request.entry.function == UNMODIFIED:
        return
    given = ["--infer"] if request.infer else []
    given += [f"--step {request.step}"] if request.step else []
    given += [f"--split {split}" for split in request.splits]
    for option in given:
        name = Path(request.entry.location).name
        raise UsageError(
            f"`{option}` is for scripts without a function `build`",
            hint="leave it out: what `build` splits is searched as it is written"
            if request.infer
            else f"name a function with `{name}:FUNCTION`",
        )


def space_for(
    request: SearchRequest, target: Target, progress: Progress, *, alone: str = ""
) -> tuple[SearchRequest, Target, SearchSpace]:
    """Finds the search space of a request; runs a script without `build` for the first time.

    Args:
      alone: name of the target for a script without a mesh, if this machine has a single device
        and the request names no other; else such a script is refused.

    Returns:
      The request, which knows then how the script is run up to its step, with its own mesh as the
      baseline; the target, with as many virtual CPU devices as the script asks for, where the
      target leaves that open; and the space: the script's own axes, unless another one is named.

    Raises:
      UsageError: bad input; or the script has no mesh or no step that is seen, or fails.
    """
    check_capture_options(request)
    if request.entry.function != UNMODIFIED:
        return request, target, read_space(request.space)
    found = _discovered(request, target, progress)
    asked = ""
    if found.asked_devices:
        target = parse_target(f"cpu:{found.asked_devices}", os.environ)
        request = replace(request, target=target.name)
        asked = (
            f"the script asks for {found.asked_devices} virtual CPU devices: it is searched for "
            f"them, as with `--target {target.name}`"
        )
    is_local = target.absent is None and not target.cpu_devices
    if alone and not found.makes_mesh and found.num_devices == 1 and is_local:
        target = parse_target(alone, os.environ)
        request = replace(request, target=target.name)
        asked = alone_notice(target)
    if not found.makes_mesh:
        return inferred(request, target, found, progress, (asked,) if asked else ())
    if request.infer:
        check_around(request, found)
    found = carried(request, target, found, progress)
    check_splits(request.splits, found.capture.mesh)
    found = _with_splits(found, request.splits)
    space = _space(request, found)
    if request.infer:
        found, space = searched_around(request, target, found, space)
    capture = found.capture
    entry = replace(request.entry, function=capture.step.name, capture=capture)
    notices = (*_notices(found, space), *([asked] if asked else []))
    for notice in notices:
        progress.notice(notice)
    return (
        replace(
            request,
            subject=entry,
            baseline=request.baseline or _baseline(found, target),
            notices=(*request.notices, *notices),
        ),
        target,
        space,
    )


def alone_notice(target: Target) -> str:
    """Returns the notice that virtual devices replace the single device of this machine."""
    return (
        f"this machine has a single device: looked at on {target.cpu_devices} virtual ones, "
        f"--target {target.name}"
    )


def _baseline(found: Discovery, target: Target) -> str:
    """Returns the script's own mesh, with the slices or nodes on the axes that may span them; empty
    if the mesh has another number of devices than there are, or cannot be laid out so."""
    searched = found.capture.searched
    if searched.num_devices != found.num_devices or found.capture.num_devices:
        return ""
    granules = target.absent.fabric.num_granules if target.absent is not None else 1
    spanning = _spanning(searched.axes, _slow_axes(found), granules)
    if spanning is None:
        return ""
    parts = [f"dcn.{name}:{count}" for name, count in spanning.items()]
    own = [(name, size // spanning.get(name, 1)) for name, size in searched.axes]
    parts += [f"{name}:{size}" for name, size in own if size > 1]
    return ",".join(parts) or f"{searched.names[0]}:1"


def _slow_axes(found: Discovery) -> tuple[str, ...]:
    """Returns the axes that may span slices or nodes, in the order of the mesh.

    These are the axes that split the batch, and all others, such as `fsdp` or `envs`, that are not
    named like those of tensor, sequence or expert parallelism: an axis that splits only the state
    may be wanted across nodes, and the estimate prices what that costs. If no axis of the mesh is
    known to split the batch, all may.
    """
    names = found.capture.searched.names
    if set(names).isdisjoint(found.batch_axes):
        return names
    return tuple(
        name for name in names if name in found.batch_axes or not is_usual_model_axis(name)
    )


def _spanning(axes: Sizes, names: Sequence[str], granules: int) -> dict[str, int] | None:
    """Divides the axes among slices or nodes, the first axes as far as possible. Returns the parts
    of each axis; None if their sizes do not divide by the number of slices or nodes."""
    found: dict[str, int] = {}
    left = granules
    for name, size in axes:
        count = math.gcd(size, left) if name in names else 1
        if count > 1:
            found[name] = count
            left //= count
    return found if left == 1 else None


def _with_splits(found: Discovery, splits: tuple[AxisSplit, ...]) -> Discovery:
    into = names_in_place(splits)
    batch = [part for name in found.batch_axes for part in into.get(name, (name,))]
    capture = replace(found.capture, splits=splits)
    return replace(found, capture=capture, batch_axes=tuple(batch))


def _discovered(request: SearchRequest, target: Target, progress: Progress) -> Discovery:
    refuse_gang(target, "a script without `build`")
    name = Path(request.entry.location).name
    progress.now(f"{name} has no function `build`: running it up to its training step")
    folder = str(folder_until_exit("step"))
    job = DiscoverJob(
        step=step_ref(request.entry, target),
        wanted=request.step,
        folder=folder,
        infer=request.infer,
        measures_nothing=request.dry_run,
    )
    answer = _first_run(request, job, surroundings_of(target), progress)
    undivided: OtherDevices | None = None
    said = ""
    while isinstance(answer, OtherDevices):
        count, before = answer.num_devices, job.num_devices
        if answer.undivided:
            undivided = undivided or answer
            said = said or (
                f"of {before or 'all'} devices does not divide its arrays ({answer.undivided})"
            )
            why = f"its mesh {said}: running it on {count}"
        else:
            why = f"{name} names {count} devices: running it again with as many"
        progress.now(why)
        job = replace(job, num_devices=count)
        try:
            answer = _first_run(request, job, surroundings_naming(count, target), progress)
        except UsageError as error:
            if undivided is None:
                raise
            hint = f"on {count} devices, of which its mesh might divide it: {error.message}"
            raise UsageError(undivided.reason, hint=hint) from error
    found = answer.capture
    capture = replace(found, folder=folder, start_s=answer.took_s, undivided=said)
    return replace(answer, capture=capture)


def _first_run(
    request: SearchRequest, job: DiscoverJob, surroundings: Surroundings, progress: Progress
) -> Discovery | OtherDevices:
    failed = ""

    def on_event(event: dict[str, Any]) -> None:
        nonlocal failed
        match event.get("event"):
            case "waits":
                progress.log(str(event.get("text", "")))
            case "failed":
                failed = str(event.get("text", ""))
            case _:
                pass

    with one_worker(
        surroundings, memory_limit_bytes=request.memory_limit_bytes, progress=progress
    ) as pool:
        answer = pool.run(job, request.timeout_s, on_event)
    if isinstance(answer, Failure):
        if answer.stage == "alone" and failed:  # The process ended before it could say it itself.
            hint = f"`{request.entry.by_itself}` was being run by itself, and had not ended"
            raise UsageError(failed, hint=hint)
        raise _ended_at(answer, request.entry, job)
    if not isinstance(answer, Discovery | OtherDevices):
        raise TypeError(f"a job of kind {job.kind} was answered with {type(answer).__name__}")
    return answer


def _ended_at(answer: Failure, entry: Entry, job: DiscoverJob) -> UsageError:
    """Returns the error for a first run; if it was ended from outside, with the line that ran then,
    as far as it is known."""
    at = last_line(job.folder)
    if at is None or not isinstance(answer, OutOfMemory | TimedOut):
        return inspection_error(answer, entry)
    if isinstance(answer, OutOfMemory):
        return UsageError(
            f"the script ran out of memory at {at.line}: {answer.detail}",
            hint=limits_hint()
            or f"give it a smaller model or batch here, raise --worker-memory{_elsewhere(job)}",
        )
    error = inspection_error(answer, entry)
    if at.doing:
        smaller = f"give it a smaller model or batch here, raise --timeout{_elsewhere(job)}"
        error = inspection_error(answer, entry, late=smaller)
    return UsageError(f"{error.message}; it was at {at}", hint=error.hint)


def _elsewhere(job: DiscoverJob) -> str:
    """Returns the words on an estimate that spares a script its arrays, if this was none."""
    if job.step.absent is not None or job.measures_nothing:
        return ""
    return (
        ", or estimate it with `--dry-run`, which neither makes its arrays nor computes with them, "
        "unless it reads one before its step"
    )


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
    slow = _slow_axes(found)
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
    if capture.undivided:
        said.append(
            f"the mesh that the script makes {capture.undivided}: it was run on "
            f"{capture.num_devices} virtual ones, and has no mesh of its own that others could be "
            "compared with; name one with `--baseline`"
        )
    elif capture.num_devices:
        said.append(
            f"the script names {capture.num_devices} devices, and was run on as many virtual ones: "
            "it has no mesh of the target's devices that others could be compared with; name one "
            "with `--baseline`"
        )
    elif mesh.num_devices != found.num_devices:
        said.append(
            f"the script's mesh is made of {mesh.num_devices} of {found.num_devices} devices, so "
            "others are not compared with it; name one that has them all with `--baseline`; the "
            f"meshes that are searched, and the rule, take all {found.num_devices}, those too that "
            "the script may use for something else"
        )
    said += [_about_split(split, capture) for split in capture.splits]
    if not capture.splits and not space.mapping and found.num_devices > 1:
        said += _about_one_axis(found)
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
    said += _about_other_meshes(found)
    slow = [axis.name for axis in space.axes if axis.dcn]
    if space.name == _OWN_AXES and len(slow) < len(space.axes):
        spanning = ", ".join(f"`{name}`" for name in slow)
        inside = ", ".join(f"`{axis.name}`" for axis in space.axes if not axis.dcn)
        said.append(
            f"only {spanning} may span slices or nodes: no batch is split over {inside}, and such "
            "names stand for axes that stay inside of them; `dcn = true` in a space of your own "
            "lets an axis span them"
        )
    return (*said, *found.notices)


def _share(other: ScriptStep, found: Discovery) -> str:
    """Describes a function that is not searched, and its share of the script's work."""
    every = [found.capture.step, *found.other_steps]
    total = sum(step.flops * step.calls for step in every)
    share = other.flops * other.calls / total if total else 0.0
    return (
        f"`{other.name}` ({other.called_at}; {count(other.calls, 'call')}, "
        f"{format_bytes(other.argument_bytes)}, {share:.0%} of the work up to here)"
    )


def _about_other_meshes(found: Discovery) -> list[str]:
    own = found.capture.mesh
    said: list[str] = []
    for is_whole, what in (
        (True, "another mesh of all devices, which goes along with the first"),
        (False, "a mesh of some of the devices, which stays as it is"),
    ):
        meshes = [
            f"{one} ({one.made_at})"
            for one in found.other_meshes
            if one.axes != own.axes and (one.num_devices == own.num_devices) == is_whole
        ]
        if meshes:
            said.append(f"the script makes {what}: {', '.join(meshes[:3])}")
    return said


def _about_one_axis(found: Discovery) -> list[str]:
    """Says how more than one plan is searched for a mesh of one axis, if that may help: if the axis
    splits the batch, and arrays do not say in their types how they are split."""
    mesh = found.capture.mesh
    if len(mesh.axes) != 1 or "explicit" in mesh.axis_types or not found.batch_axes:
        return []
    (axis,) = mesh.names
    into = [name for name in _PARTS if name != axis][:2]
    return [
        f"the one axis of its mesh leaves one plan; `--split {axis}={','.join(into)}` divides it "
        f"into two, of which `{into[1]}` also splits the state that `{axis}` leaves whole"
    ]


def _about_split(split: AxisSplit, capture: Capture) -> str:
    """Says what a split does, and what to write in the script to have it."""
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
