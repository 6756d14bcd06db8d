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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from automesh.foreign.private import append_own, is_own_folder, read_own
from automesh.limits import SMALL_RECORD_BYTES
from automesh.program.absent.device_queries import seen_by_scripts
from automesh.program.capture.nouns import AxisSplit, Capture
from automesh.program.capture.step_call import TracedCall, place_of
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.stored_step import (
    LARGEST_STORED_BYTES,
    OWN_MESH,
    CarriedCall,
    carried_call,
    read_step,
    set_config,
    store,
    store_in,
)
from automesh.program.carry.values import StoredStepLost
from automesh.reading import Unreadable

# Values of larger arguments are not kept: there may be many meshes.
_LARGEST_BYTES = 2**28
_WITH_VALUES = "-values"


def keep_first(folder: str, call: TracedCall, own: Mesh, placed: Sequence[Any]) -> None:
    """Stores the step of a script's first run, as `stored_step.store` does, and notes its mesh.

    Args:
      own: the script's own mesh.
    """
    store_in(folder, call, own, placed)
    append_own(Path(folder) / OWN_MESH, f"{_digest(own, ())}\n".encode())


def kept_call(capture: Capture, mesh: Mesh, *, with_values: bool) -> CarriedCall | None:
    """Returns the call of the step that an earlier run has left for a mesh, and gives jax the
    settings of that run; None if no run has left one, or if values are needed and were not kept.

    Args:
      mesh: the mesh of a plan, with the axes of the search.
    """
    folder = _folder(capture, mesh)
    if folder is None:
        return None
    folders = (_valued(folder),) if with_values else (_valued(folder), folder)
    first = folder.parent
    # Its values are those of a later call, perhaps, than the one at which other runs stop.
    if not with_values and _is_own(first, folder):
        folders = (*folders, first)
    for one in folders:
        if not is_own_folder(one):
            continue
        try:
            step = read_step(one)
            set_config(step)
            return carried_call(step, one, mesh, by="trace", with_values=with_values)
        except (StoredStepLost, CannotCarry):
            continue
    return None


def keep_call(capture: Capture, mesh: Mesh, call: TracedCall, made: Mesh) -> None:
    """Stores the call of a step for later processes; does nothing if it cannot be stored.

    Args:
      made: the mesh that the script got for its own.
    """
    folder = _folder(capture, mesh)
    if folder is None or _valued(folder).exists():
        return
    draft = Path(tempfile.mkdtemp(dir=capture.folder))
    placed = [place_of(leaf) for leaf in call.leaves]
    left = LARGEST_STORED_BYTES - _bytes_in(Path(capture.folder))
    try:
        step = store(
            call, draft, own=made, placed=placed, most_bytes=max(min(_LARGEST_BYTES, left), 0)
        )
        # Fails if another process was faster.
        draft.rename(_valued(folder) if step.has_values else folder)
    except (CannotCarry, OSError):
        shutil.rmtree(draft, ignore_errors=True)


def _is_own(first: Path, folder: Path) -> bool:
    """Whether the first run of the script was on the mesh of a folder, and has left its step."""
    path = first / OWN_MESH
    if not path.exists():
        return False
    try:
        noted = read_own(path, limit_bytes=SMALL_RECORD_BYTES).decode().split()
    except Unreadable:
        return False
    return folder.name in noted


def _valued(folder: Path) -> Path:
    return folder.with_name(folder.name + _WITH_VALUES)


def _bytes_in(folder: Path) -> int:
    """Returns the bytes of all files in the folders of the meshes."""
    return sum(one.stat().st_size for one in folder.glob("on-*/*"))


def _folder(capture: Capture, mesh: Mesh) -> Path | None:
    """Returns the folder of the step on a mesh; None where nothing is stored, as on a host other
    than that of the search.

    The devices that the script sees are part of the name: the estimates of one search may run it on
    virtual CPU devices, and its measurements on GPUs.
    """
    if not capture.folder or not is_own_folder(Path(capture.folder)):
        return None
    return Path(capture.folder) / _digest(mesh, capture.splits)


def _digest(mesh: Mesh, splits: tuple[AxisSplit, ...]) -> str:
    axes = (tuple(mesh.shape.items()), tuple(map(str, mesh.axis_types)))
    digest = hashlib.sha256(repr((axes, splits, seen_by_scripts())).encode())
    return f"on-{digest.hexdigest()[:16]}"
