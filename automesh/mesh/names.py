"""Checks the names of mesh axes that people give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of


def check_names(axes: Sequence[str], batch_axes: Sequence[str]) -> None:
    """Checks that axis names are distinct, and that batch axes are distinct axes.

    Raises:
      UsageError: no or repeated axes, or a batch axis that is no axis or repeated.
    """
    if not axes or len(set(axes)) < len(axes):
        raise UsageError(
            f"mesh axes must be distinct names, got {list(axes)}",
            hint="give every axis a name of its own, at least one",
        )
    for name in batch_axes:
        if name not in axes:
            raise UsageError(
                f"batch axis `{name}` is not a mesh axis{did_you_mean(name, axes)}",
                hint=f"the mesh axes are: {', '.join(axes)}",
            )
    if len(set(batch_axes)) < len(batch_axes):
        raise UsageError(
            f"batch axes must be distinct, got {list(batch_axes)}", hint="leave one of them out"
        )


def as_names(names: object, what: str) -> tuple[str, ...]:
    """Checks a sequence of names, and makes it a tuple.

    Args:
      what: what they name, for the error.

    Raises:
      WrongType: something else, a single string too.
    """
    hint = 'write for example `("data", "model")`, and `("data",)` for one axis'
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise WrongType(
            f"{what} must be a sequence of strings, got {kind_of(names)}: {names!r}", hint=hint
        )
    listed = cast("Sequence[Any]", names)
    for name in listed:
        if not isinstance(name, str):
            raise WrongType(f"{what} must be strings, got {kind_of(name)}: {name!r}", hint=hint)
    return tuple(listed)
