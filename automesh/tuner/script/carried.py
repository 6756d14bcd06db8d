"""Checks whether the step of a script's first run can be carried to other meshes, and whether the
script itself gives the winner's program.

As a rule a script is started at most three times: for its step; on another mesh, if there is one,
to see what depends on the mesh; and on the winner's mesh, before that becomes a rule. If its own
mesh has axes of size 1, jax shows only on another mesh what it would split over those axes: the
step of that mesh is carried then, back to the script's own mesh for the check, and if it differs
there, the script is started once more. All other processes use the stored step
(`automesh.program.carry`).

A script that reads the sizes of its mesh is started once more, on a mesh that does not divide an
argument of the carried step, if there is one: it may leave whole there what it splits elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from automesh.hardware import Target
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failure
from automesh.program.capture.nouns import AxisSplit, CarryCheck, Discovery, ScriptMesh, Sizes
from automesh.program.carry.starts import again, lost, starts
from automesh.program.nouns import Entry
from automesh.report.progress import Progress
from automesh.report.words import count
from automesh.space.enumerate import factorizations
from automesh.tuner.preparation import step_ref
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.metadata import Header
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import ask, one_worker, surroundings_of
from automesh.worker.messages import CarryJob, Surroundings

# Most meshes that are tried for the second run, until jax accepts the carried step on one.
_MOST_MESHES = 6
# Characters of two reasons that are compared.
_COMPARED = 120
_AGAIN = "run again for each mesh"


def carried(
    request: SearchRequest, target: Target, found: Discovery, progress: Progress
) -> Discovery:
    """Returns the discovery with the decision whether workers may use the stored step on other
    meshes.

    The stored step must equal that of a second run, in a fresh process, on another mesh. If it does
    not, the script is run again for each mesh, and a notice says why and how long a run takes.
    """
    name = Path(request.entry.location).name
    if found.not_carried:
        return _with_notice(found, f"{name} is {_AGAIN}: {found.not_carried}")
    plans = other_meshes(found.capture.mesh, found.num_devices)
    if not plans:
        # A mesh of one axis over all devices: what depends on the mesh cannot differ.
        return replace(found, capture=found.capture.stored("trace"))
    progress.now(f"running {name} a second time, to see what depends on its mesh")
    entry = replace(request.entry, function=found.capture.step.name, capture=found.capture)
    answer = _check(request, target, entry, plans, progress)
    if isinstance(answer, CarryCheck) and answer.is_stored and answer.difference:
        # If an axis has size 1, jax does not show what it would split over that axis.
        progress.now(f"running {name} a third time: its own mesh does not divide over all axes")
        stored = replace(found.capture.mesh, axes=_sizes_of(answer.mesh))
        answer = _check(request, target, entry, other_meshes(stored, found.num_devices), progress)
    if isinstance(answer, Failure):
        said = f"a further run of it fails ({inspection_error(answer, entry).message})"
        return _with_notice(found, f"{name} is {_AGAIN}: {said}")
    if answer.difference:
        where = f"on {answer.mesh}, " if answer.mesh else ""
        return _with_notice(found, f"{where}{answer.difference}: {name} is {_AGAIN}")
    if answer.batch:
        said = f"the batch of {name} depends on its mesh ({answer.batch}): all are searched with"
        notices = (*found.notices, f"{said} that of {found.capture.mesh}, its own mesh")
        found = replace(found, notices=notices)
    return replace(found, capture=found.capture.stored(answer.by))


def _sizes_of(mesh: str) -> Sizes:
    """Reads the axes of a mesh such as `data:4,model:2`."""
    pairs = (part.partition(":") for part in mesh.split(","))
    return tuple((name, int(size)) for name, _, size in pairs)


def surroundings_naming(count: int, target: Target) -> Surroundings:
    """Returns the surroundings of a worker for a script that names a number of devices."""
    return replace(surroundings_of(target), platforms="cpu", cpu_devices=count)


def _check(
    request: SearchRequest,
    target: Target,
    entry: Entry,
    plans: Sequence[Plan],
    progress: Progress,
) -> CarryCheck | Failure:
    job = CarryJob(step=step_ref(entry, target), plans=tuple(plans), limit_s=request.timeout_s)
    named = entry.capture.num_devices if entry.capture is not None else 0
    surroundings = surroundings_naming(named, target) if named else surroundings_of(target)
    with one_worker(
        surroundings, memory_limit_bytes=request.memory_limit_bytes, progress=progress
    ) as pool:
        return ask(pool, job, CarryCheck, request.timeout_s)


def other_meshes(own: ScriptMesh, num_devices: int) -> list[Plan]:
    """Returns meshes for the second run, the best first: most sizes differ from the script's mesh,
    and the largest size is small, so that it divides most arrays.

    The script's own mesh is not among them: the stored step is always equal to that of a second run
    there, which tells nothing about other meshes.
    """
    sizes = [size for _, size in own.axes]

    def unlike(others: Sequence[int]) -> tuple[int, int]:
        changed = sum(size != other for size, other in zip(sizes, others, strict=True))
        return -changed, max(others)

    every = factorizations(num_devices, len(sizes)).tolist()
    ordered = sorted([one for one in every if one != sizes], key=unlike)
    return [
        Plan(axes=tuple(MeshAxis(name=n, ici=size) for n, size in zip(own.names, one, strict=True)))
        for one in ordered[:_MOST_MESHES]
    ]


def _with_notice(found: Discovery, notice: str) -> Discovery:
    found = replace(found, capture=found.capture.stored(""))
    took = f", which takes {found.took_s:.1f} s each time" if found.took_s >= 1 else ""
    return replace(found, notices=(*found.notices, notice + took))


def check_winner(request: SearchRequest, target: Target, plan: Plan, progress: Progress) -> str:
    """Runs the script on the mesh of a plan that is to become a rule.

    Returns:
      A sentence on how the script differs there from the measured program; empty if it does not, or
      if its step was not carried.
    """
    capture = request.entry.capture
    if capture is None or not capture.is_carried or not capture.makes_mesh:
        return ""  # A script without a mesh runs on one device, and not on that of the rule.
    axes = _script_axes(plan, capture.mesh, capture.splits)
    if tuple((axis.name, axis.size) for axis in axes) == capture.mesh.axes:
        return ""  # The first run was on this mesh.
    if capture.num_devices:
        return ""  # The script runs on as many devices as it names, and on no others.
    name = Path(request.entry.location).name
    progress.now(f"running {name} itself on {plan.mesh}, the mesh of the rule")
    entry = replace(request.entry, capture=replace(capture, splits=()))
    answer = _check(request, target, entry, [Plan(axes=axes)], progress)
    if isinstance(answer, Failure):
        return f"{name} itself fails there: {inspection_error(answer, entry).message}"
    if answer.batch:
        return (
            f"{name} itself takes another batch there ({answer.batch}); give it one for all meshes"
        )
    return answer.difference


def _script_axes(plan: Plan, own: ScriptMesh, splits: Sequence[AxisSplit]) -> tuple[MeshAxis, ...]:
    """Returns the mesh of a plan as sizes of the script's own axes, inside and between granules."""
    into = {split.axis: split.into for split in splits}
    sizes = {axis.name: axis.size for axis in plan.axes}
    return tuple(
        MeshAxis(name=name, ici=math.prod(sizes.get(part, 1) for part in into.get(name, (name,))))
        for name in own.names
    )


def _distinct(reasons: Sequence[str]) -> list[str]:
    """Returns the reasons that differ in more than numbers: several meshes have the same one, each
    with its sizes. Long reasons are cut, so their ends do not count."""
    kinds: dict[str, str] = {}
    for reason in reasons:
        # The numbers of lines stay.
        kind = re.sub(r"(\.py|\.ipynb[^:]*)?:\d+", lambda m: m[0] if m[1] else ":", reason)
        kind = re.sub(r"[\[(][\d, .]*", "(", kind)
        kinds.setdefault(kind[:_COMPARED], reason)
    return list(kinds.values())


def with_starts(header: Header, entry: Entry) -> Header:
    """Adds to a header how often the script was started and why, the reasons why it was run for
    single meshes although its step is carried, and whether its stored step was lost; for an entry
    with `build`, returns the header unchanged."""
    capture = entry.capture
    if capture is None or not (why := starts(capture.folder)):
        return header
    said = f"the script was started {count(len(why), 'time')}: {', '.join(why)}"
    name = Path(entry.location).name
    notices = [
        f"{name} was run up to its step again for meshes to which it could not be carried: {reason}"
        for reason in _distinct(again(capture.folder))
    ]
    if reasons := lost(capture.folder):
        notices.append(
            f"the stored step of {name} was lost while the search ran ({'; '.join(reasons)}): from "
            "then on the script was run up to its step again for each mesh"
        )
    facts = replace(
        header.facts,
        details=(*header.facts.details, said),
        notices=(*header.facts.notices, *notices),
    )
    return replace(header, facts=facts)
