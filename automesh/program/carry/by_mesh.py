"""Keeps the steps of runs on single meshes, for a script whose step is not carried from one mesh to
all others (jax).

Such a script is run for each mesh of the search. Each estimate, compile and measurement of that
mesh works in a process of its own, so the first one stores the step beside that of the first run,
and the others load it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from jax.sharding import Mesh

from automesh.foreign.private import is_own_folder
from automesh.program.capture.nouns import Capture
from automesh.program.capture.step_call import TracedCall, place_of
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.stored_step import CarriedCall, carried_call, read_step, store
from automesh.program.carry.values import StoredStepLost, bytes_of

# Values of larger arguments are not kept: there may be many meshes.
_LARGEST_BYTES = 2**28


def kept_call(capture: Capture, mesh: Mesh, *, with_values: bool) -> CarriedCall | None:
    """Returns the call of the step that an earlier run has left for a mesh; None if there is none,
    or if its values are needed and too large to be kept.

    Args:
      mesh: the mesh of a plan, with the axes of the search.
    """
    folder = _folder(capture, mesh)
    if folder is None or not is_own_folder(folder):
        return None
    try:
        step = read_step(folder)
        if with_values and not step.has_values:
            return None
        return carried_call(step, folder, mesh, by="trace", with_values=with_values)
    except (StoredStepLost, CannotCarry):
        return None


def keep_call(capture: Capture, mesh: Mesh, call: TracedCall, made: Mesh) -> None:
    """Stores the call of a step for later processes; does nothing if it cannot be stored.

    Args:
      made: the mesh that the script got for its own.
    """
    folder = _folder(capture, mesh)
    if folder is None or folder.exists():
        return
    draft = Path(tempfile.mkdtemp(dir=capture.folder))
    placed = [place_of(leaf) for leaf in call.leaves]
    is_small = bytes_of(call.leaves) <= _LARGEST_BYTES
    try:
        store(call, draft, own=made, placed=placed, with_values=is_small)
        draft.rename(folder)  # Fails if another process was faster.
    except (CannotCarry, OSError):
        shutil.rmtree(draft, ignore_errors=True)


def _folder(capture: Capture, mesh: Mesh) -> Path | None:
    """Returns the folder of the step on a mesh; None where nothing is stored, as on a host other
    than that of the search."""
    if not capture.folder or not is_own_folder(Path(capture.folder)):
        return None
    devices = [device.id for device in mesh.devices.flat]
    described = (tuple(mesh.shape.items()), tuple(map(str, mesh.axis_types)), devices)
    digest = hashlib.sha256(repr((described, capture.splits)).encode()).hexdigest()[:16]
    return Path(capture.folder) / f"on-{digest}"
