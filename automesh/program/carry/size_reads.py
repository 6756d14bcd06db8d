"""Sees whether a script asks for the sizes of its mesh, and may thus do something else on another
mesh (jax).

Public in jax: `Mesh.shape`, which is computed once a mesh and then kept in the mesh itself.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.package import our_folders

_SHAPE = "shape"
_MOST = 100  # lines that are noted
_JAX = f"{Path(jax.__file__).parent}{os.sep}"


@contextmanager
def seeing_sizes_read() -> Generator[list[str]]:
    """Yields a list of each file and line that reads `Mesh.shape` in the body; those of jax and
    automesh are left out, and other ways to the sizes are not seen, such as `mesh.devices.shape`.
    If jax computes the shape in another way, the list has one entry."""
    found: list[str] = []
    original: Any = vars(Mesh).get(_SHAPE)
    compute: Any = getattr(original, "func", getattr(original, "fget", None))
    if compute is None:
        found.append("")
        yield found
        return
    own = (_JAX, *our_folders())

    def read(mesh: Mesh) -> Any:
        frame = inspect.currentframe()
        asking = None if frame is None else frame.f_back
        file = "" if asking is None else asking.f_code.co_filename
        if asking is not None and len(found) < _MOST and not file.startswith(own):
            found.append(f"{file}:{asking.f_lineno}")
        return compute(mesh)

    setattr(Mesh, _SHAPE, property(read))
    try:
        yield found
    finally:
        setattr(Mesh, _SHAPE, original)
