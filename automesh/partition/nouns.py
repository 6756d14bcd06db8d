"""The nouns of partitioning: named axes, and mappings from logical names to mesh axes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from jax.sharding import AbstractMesh, Mesh

from automesh.errors import UsageError, WrongType, kind_of

PhysicalAxisSpec: TypeAlias = str | Sequence[str]
"""A mesh axis, or several, the major one first."""

ResourceMapping: TypeAlias = Mapping[str, PhysicalAxisSpec | None]
"""Logical axis name -> mesh axes; a name that is absent, or maps to None, is not split."""

MeshLike: TypeAlias = Mesh | AbstractMesh


class ResourceAxis(enum.StrEnum):
    """Customary names of mesh axes; any other names work as well.

    Example:
      >>> from automesh.partition import ResourceAxis
      >>> ResourceAxis.DATA == "data"
      True
    """

    MODEL = "model"
    DATA = "data"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Axis:
    """A logical axis, like Haliax's `Axis`, but without Haliax.

    Example:
      >>> from automesh.partition import Axis
      >>> Axis("embed", 512)
      Axis(name='embed', size=512)

    Attributes:
      name: the logical name.
      size: elements along the axis, in the whole array.

    Raises:
      UsageError: the name is empty, or the size negative.
      WrongType: the name is no string, or the size no integer.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not is_text(self.name):
            raise WrongType(f"the name of an axis must be a string, got {kind_of(self.name)}")
        if not is_integer(self.size):
            raise WrongType(
                f"the size of axis `{self.name}` must be an integer, got {kind_of(self.size)}"
            )
        if not self.name or self.size < 0:
            raise UsageError(
                f"an axis needs a name and a size of at least 0, got {self.name!r} and {self.size}"
            )


class AxisLike(Protocol):
    """The attributes of an axis; `Axis` of this module and Haliax's have them."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


AxisSelector: TypeAlias = AxisLike | str
"""One axis: itself, or its name."""

AxisSelection: TypeAlias = AxisSelector | Sequence[AxisSelector] | Mapping[str, int | None]
"""Several axes, in the order of an array's dimensions."""


def is_text(value: object) -> bool:
    """Whether a value of unknown type is a string."""
    return isinstance(value, str)


def is_integer(value: object) -> bool:
    """Whether a value of unknown type is an integer, but no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
