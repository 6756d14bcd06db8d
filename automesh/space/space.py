"""The nouns of a search space, as its TOML file states them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from automesh.errors import UsageError
from automesh.limits import LARGEST_INTEGER
from automesh.mesh.axes import Scalar
from automesh.mesh.mapping import MappedAxes

Relation = Literal["size", "max", "min", "divides"]
DEFAULT_OPTION = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRange:
    """The possible sizes of one mesh axis; the bounds apply to `ici * dcn`.

    Attributes:
      maximum: 0 for no bound.
      dcn: True if the axis may span granules.
    """

    name: str
    minimum: int = 1
    maximum: int = 0
    dcn: bool = False

    def __post_init__(self) -> None:
        if self.maximum and self.minimum > self.maximum:
            raise UsageError(
                f"axis `{self.name}` must be at least {self.minimum} and at most {self.maximum}, "
                "which no size is",
                hint="swap `min` and `max`, or drop one of them",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One condition on a product of axes and integer knobs.

    Attributes:
      factors: names of axes and of integer knobs.
      bound: an integer, or the name of one of the workload's facts.
    """

    factors: tuple[str, ...]
    relation: Literal["divides", "max", "min"]
    bound: int | str

    def __str__(self) -> str:
        return f"{'*'.join(self.factors)} {self.relation} {self.bound}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting and the values to try, in the order of the file."""

    name: str
    values: tuple[Scalar, ...]


def checked_knob(name: str, values: Sequence[Scalar], *, said: str) -> Knob:
    """Makes a knob; its values must be distinct and finite, and integers have at most 64 bits.

    Args:
      said: the beginning of an error: `` `knobs.remat` lists``.

    Raises:
      UsageError: the values are not so.
    """
    kinds = [(type(value), value) for value in values]
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"{said} a value twice")
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise UsageError(f"{said} a number that is not finite")
    if any(isinstance(value, int) and abs(value) > LARGEST_INTEGER for value in values):
        raise UsageError(f"{said} a number that 64 bits do not hold")
    return Knob(name=name, values=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalAxis:
    """A logical axis of the step's arrays, and its possible mesh axes, in the order of the file.

    Attributes:
      choices: mesh axes, the slowest varying first; an empty choice splits nothing.
    """

    name: str
    choices: tuple[MappedAxes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Everything that a search may vary.

    Attributes:
      name: shipped name, or the path of the user's file.
      shipped: True for a space that comes with automesh: if a workload lacks something, that is
        dropped with a notice; in a user's own space it is an error.
      names: all axes of the mesh in order; those without a range have size 1.
      axes: the axes that vary, in the order of `names`.
      batch_axes: axes that the rows of a batch are split over, for the rule.
      mapping: logical axes whose mesh axes are searched, too.
      compiler_options: options by platform; the value `default` leaves the option out.
    """

    name: str
    shipped: bool
    names: tuple[str, ...]
    axes: tuple[AxisRange, ...]
    batch_axes: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    mapping: tuple[LogicalAxis, ...] = ()
    knobs: tuple[Knob, ...] = ()
    compiler_options: tuple[tuple[str, tuple[Knob, ...]], ...] = ()

    def options_for(self, platform: str) -> tuple[Knob, ...]:
        """Returns the compiler options of one platform (cpu, gpu or tpu)."""
        return dict(self.compiler_options).get(platform, ())
