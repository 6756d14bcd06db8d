"""Axis types as plain words, one per mesh axis: `jax.sharding.AxisType` without jax."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, cast

from automesh.errors import UsageError, WrongType, kind_of

AUTO = "auto"
AXIS_TYPES = (AUTO, "explicit", "manual")
"""auto: the compiler chooses shardings; explicit: they are part of types; manual: per device."""


def as_axis_types(wanted: object, names: Sequence[str]) -> tuple[str, ...]:
    """Returns one word for each axis; auto by default.

    Args:
      wanted: the words auto, explicit and manual (in any case) or `jax.sharding.AxisType`s, one for
        each axis or one for all; None and an empty sequence mean auto.
      names: of the axes.

    Raises:
      WrongType: neither a word nor an AxisType.
      UsageError: an unknown word, or a number of types that is neither 1 nor that of the axes.

    Example:
      >>> as_axis_types("explicit", ("dp", "tp")), as_axis_types(None, ("dp",))
      (('explicit', 'explicit'), ('auto',))
    """
    types = as_words(wanted) or (AUTO,)
    if len(types) == 1:
        return types * len(names)
    if len(types) != len(names):
        raise UsageError(
            f"got {len(types)} axis types {list(types)} for the {len(names)} axes {list(names)}",
            hint="give one axis type for each axis, or one for all",
        )
    return types


def as_words(wanted: object) -> tuple[str, ...]:
    """Converts axis types to words, as many as were given: one for each axis, one for all, or none.

    Raises:
      WrongType, UsageError: as `as_axis_types`.
    """
    if wanted is None:
        return ()
    listed = (wanted,) if isinstance(wanted, (str, Enum)) else _listed(wanted)
    return tuple(_as_word(one) for one in listed)


def _listed(wanted: object) -> Sequence[Any]:
    if not isinstance(wanted, Sequence):
        raise WrongType(
            f"axis types must be words or jax.sharding.AxisType, got {kind_of(wanted)}: {wanted!r}",
            hint=f"use {', '.join(AXIS_TYPES)}",
        )
    return cast("Sequence[Any]", wanted)


def _as_word(wanted: object) -> str:
    # An AxisType is recognized by its name, as this module must not import jax.
    word = wanted.name if isinstance(wanted, Enum) else wanted
    if not isinstance(word, str):
        raise WrongType(
            f"an axis type must be a word or a jax.sharding.AxisType, got {kind_of(wanted)}: "
            f"{wanted!r}",
            hint=f"use {', '.join(AXIS_TYPES)}",
        )
    found = word.strip().lower()
    if found not in AXIS_TYPES:
        raise UsageError(
            f"`{wanted}` is not an axis type; use {', '.join(AXIS_TYPES)}",
            hint="auto lets the compiler choose shardings; it is the default",
        )
    return found
