"""`--infer` for a script that makes a mesh: the search tries other shardings of its state, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.limits import STORED_STEP_BYTES
from automesh.program.capture.nouns import Discovery
from automesh.program.infer.search.around import lay_around
from automesh.space.space import SearchSpace
from automesh.tuner.preparation import known_devices
from automesh.tuner.request import SearchRequest
from automesh.units import format_bytes


def check_around(request: SearchRequest, found: Discovery) -> None:
    """Refuses a script whose arrays cannot be split otherwise than it says.

    Raises:
      UsageError: its axes are Explicit, or `--split` is given, too.
    """
    name, mesh = Path(request.entry.location).name, found.capture.mesh
    if request.splits:
        raise UsageError(
            f"`--split {request.splits[0]}` and `--infer` both change how {name} splits its state",
            hint="give one of them: `--infer` also tries the state over the batch axes of the mesh",
        )
    if "explicit" in mesh.axis_types:
        raise UsageError(
            f"`--infer`: the axes of {mesh} ({mesh.made_at}) are Explicit, so that how an array is "
            f"split is part of its type in {name}, and changes only where the script changes it",
            hint="leave `--infer` out, or make the mesh with AxisType.Auto",
        )


def searched_around(
    request: SearchRequest, target: Target, found: Discovery, space: SearchSpace
) -> tuple[Discovery, SearchSpace]:
    """Returns the space with other shardings of the script's state, once it is known that its step
    can be carried to other meshes.

    Raises:
      UsageError: it cannot, or is too large to be stored for a measurement.
    """
    capture, name = found.capture, Path(request.entry.location).name
    assert found.classes is not None
    if not capture.is_carried:
        why = next(iter(reversed(found.notices)), "its step cannot be stored")
        raise UsageError(
            f"`--infer` needs the stored step of {name}: {why}",
            hint="leave `--infer` out: what the script splits is searched as it is written",
        )
    is_measured = target.absent is None and not request.dry_run
    if is_measured and capture.step.argument_bytes > STORED_STEP_BYTES:
        raise UsageError(
            f"`--infer` needs the stored arguments of the step of {name}, which have "
            f"{format_bytes(capture.step.argument_bytes)}; up to {format_bytes(STORED_STEP_BYTES)} "
            "are kept to measure it",
            hint="estimate it with `--dry-run`, or leave `--infer` out",
        )
    devices, _ = known_devices(target)
    layout = lay_around(
        found.classes,
        found.written,
        axes=capture.searched.names,
        batch_axes=[axis for axis in capture.searched.names if axis in found.batch_axes],
        num_devices=devices or found.num_devices,
    )
    found = replace(found, notices=(*layout.notices, *found.notices))
    if not layout.logical:
        return found, space
    found = replace(found, capture=replace(capture, layout=layout))
    return found, replace(space, mapping=layout.logical)
