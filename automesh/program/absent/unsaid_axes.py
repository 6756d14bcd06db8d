"""Makes meshes of the types of axes that a script was written for, where it leaves them to
`jax.make_mesh` (jax).

Older releases of jax made Auto axes there; this one makes Explicit axes, on which many scripts
that were written before fail.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

# What jax says of arrays and operations on explicit axes: it names the kind of axes, asks for an
# `out_sharding`, prints types that are split (`float32[8@data]`), or compares those of a
# `shard_map`.
_SAID = re.compile(
    r"\bExplicit\b|\bexplicit (?:mesh|axes|axis|sharding)|\bout_sharding\b|\bjax\.reshard\b"
    r"|specs of the input|\b[a-z]+\d+\[\d[^\]\n]*@"
)
_ERROR = "ShardingTypeError"
_FOLDER = str(Path(jax.__file__).parent)
# The note that jax adds to an error when it removes its own frames from the traceback.
_FRAMES_REMOVED = "JAX has removed its internal frames"


@dataclass(slots=True)
class _AxesState:
    """The data of this process.

    Attributes:
      are_auto: whether `jax.make_mesh` makes Auto axes now, where the script does not say which.
      place: the first line of the run that left the types of its axes to jax; empty if none did.
    """

    are_auto: bool = False
    place: str = ""


_STATE = _AxesState()


@contextmanager
def unsaid_axes(*, are_auto: bool) -> Generator[None]:
    """Makes Auto axes while the body runs, where a script leaves them to `jax.make_mesh`; or leaves
    them to jax unless an outer body makes Auto ones."""
    before = _STATE.are_auto
    _STATE.are_auto = before or are_auto
    try:
        yield
    finally:
        _STATE.are_auto = before


def forget_place() -> None:
    """Forgets the last run, as a new one begins."""
    _STATE.place = ""


def place() -> str:
    """Returns the first line of the last run that left the types of its axes to jax, or empty."""
    return _STATE.place


def types_for(axis_names: Sequence[str] | str, place: str) -> Any:
    """Returns the types of the axes of a mesh that a script makes without naming any; None for
    those that jax makes.

    Args:
      place: the line that makes the mesh.
    """
    _STATE.place = _STATE.place or place
    count = 1 if isinstance(axis_names, str) else len(axis_names)
    return (AxisType.Auto,) * count if _STATE.are_auto else None


def refuses_explicit(error: Exception) -> bool:
    """Whether a script fails because the axes of its mesh, which it left to jax, are Explicit."""
    if not _STATE.place or _STATE.are_auto:
        return False
    if type(error).__name__ == _ERROR:
        return True
    return _comes_from_jax(error) and bool(_SAID.search(str(error)))


def _comes_from_jax(error: Exception) -> bool:
    """Whether jax has raised an error, or was about to trace what raised it."""
    if any(_FRAMES_REMOVED in note for note in getattr(error, "__notes__", ())):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_FOLDER)


def in_words(reason: str) -> str:
    """Returns the sentence that tells the user of Auto axes.

    Args:
      reason: how the script fails with Explicit ones.
    """
    return (
        f"the script was run with Auto axes, which older releases of jax made where "
        f"`jax.make_mesh` is not told the types ({_STATE.place}); with the Explicit axes that jax "
        f"{jax.__version__} makes there, {reason}; to run it by itself, pass "
        "`axis_types=(jax.sharding.AxisType.Auto,) * n`, for `n` axes, in that line"
    )
