"""Sends a build function of a notebook to another process (no jax)."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import cloudpickle

from automesh import limits
from automesh.errors import UsageError, kind_of, unwritable
from automesh.files import write_whole
from automesh.program.nouns import Entry
from automesh.reading import Unreadable, read_bytes

_DEVICE_BOUND = (
    "Mesh",
    "Device",
    "ArrayImpl",
    "Array",
    "NamedSharding",
    "Client",
    "LoadedExecutable",
)


def pickle_entry(build: Callable[..., Any], path: Path, argv: tuple[str, ...] = ()) -> Entry:
    """Writes `build`, with the import path of this process, to `path`.

    Raises:
      UsageError: `build` is not callable, it captures something that cannot leave this process, or
        the file cannot be written.
    """
    if not callable(build):
        raise UsageError(
            f"the build function is {kind_of(build)}, which cannot be called",
            hint="pass a function that takes the mesh, or the path of a script",
        )
    name = getattr(build, "__name__", type(build).__name__)
    try:
        # Two layers: the import path must be set before functions that are pickled by name are
        # imported.
        blob: bytes = pickle.dumps((list(sys.path), cloudpickle.dumps(build)))
    # Pickling runs the reducers of captured objects, which may raise any exception.
    except Exception as error:
        culprit = next(_device_bound(build), None)
        if culprit:
            raise UsageError(
                f"`{name}` captures {culprit}, which cannot be sent to another process",
                hint="use the mesh that the function is given, and create arrays inside it",
            ) from error
        raise UsageError(
            f"`{name}` cannot be sent to another process: {error}",
            hint="create what it captures inside the function, or put it into a script",
        ) from error
    try:
        write_whole(path, blob, lasting=False)
    except OSError as error:
        hint = "make room there, or set TMPDIR to another folder"
        raise unwritable(path, error, hint=hint) from None
    return Entry(kind="pickle", location=str(path.resolve()), function=name, argv=argv)


def read_payload(path: Path) -> Callable[..., Any]:
    """Loads the build function from a file of `pickle_entry`.

    Raises:
      UsageError: the file is missing or cannot be unpickled here.
    """
    try:
        blob = read_bytes(path, limit_bytes=limits.PAYLOAD_BYTES)
    except Unreadable as error:
        raise UsageError(f"the pickled function {error.message}") from error
    try:
        path_entries, inner = cast("tuple[list[str], bytes]", pickle.loads(blob))
        sys.path[:] = [*path_entries, *(entry for entry in sys.path if entry not in path_entries)]
        return pickle.loads(inner)
    except Exception as error:
        raise UsageError(
            f"the pickled function `{path}` cannot be loaded: {type(error).__name__}: {error}",
            hint="install in this environment what the function imports",
        ) from error


def _device_bound(build: Callable[..., Any]) -> Iterator[str]:
    captured = inspect.getclosurevars(build) if inspect.isfunction(build) else None
    if captured is None:
        return
    for name, value in {**captured.nonlocals, **captured.globals}.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in cast("list[Any]", values):
            kind = type(item)
            if (
                kind.__module__.split(".")[0] in ("jax", "jaxlib")
                and kind.__name__ in _DEVICE_BOUND
            ):
                yield f"a jax {kind.__name__.removesuffix('Impl')} (`{name}`)"
