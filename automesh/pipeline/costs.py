"""The noun `StageCost`: the cost of a stage for one microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from automesh.errors import UsageError, WrongType, kind_of
from automesh.pipeline.actions import ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The seconds and bytes of one stage for one microbatch.

    The defaults are the units of the published comparisons: a backward is twice a forward, its
    halves are equal, transfers take no time.

    Attributes:
      forward_s: of an `F`.
      backward_s: of a `B`.
      input_gradient_s: of an `I`.
      weight_gradient_s: of a `W`.
      to_next_s: the transfer of the stage's output to the rank of the next stage.
      to_previous_s: the transfer of the gradient of its input to the rank of the stage before.
      activation_bytes: kept on each device from the start of `F` to the end of `B` or `W`.

    Raises:
      WrongType: something that is no number.
      UsageError: a negative, infinite or not-a-number value.

    Example:
      >>> from automesh.pipeline import StageCost
      >>> StageCost(forward_s=1e-3, backward_s=2e-3, to_next_s=1e-4).seconds("B")
      0.002
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    to_next_s: float = 0.0
    to_previous_s: float = 0.0
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise WrongType(f"{field.name} of a stage is a number, got {kind_of(value)}")
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"{field.name} of a stage is {value}; it must be a number of at least 0"
                )

    def seconds(self, kind: ActionKind) -> float:
        """Returns the seconds of an action of this kind."""
        match kind:
            case "F":
                return self.forward_s
            case "B":
                return self.backward_s
            case "I":
                return self.input_gradient_s
            case "W":
                return self.weight_gradient_s


def spread_costs(costs: StageCost | Sequence[StageCost], num_stages: int) -> tuple[StageCost, ...]:
    """Returns one cost per stage, from a single one for all or from one per stage.

    Raises:
      WrongType: something that is no `StageCost`.
      UsageError: another number of costs.
    """
    if isinstance(costs, StageCost):
        return (costs,) * num_stages
    _check_costs(costs)
    if len(costs) != num_stages:
        raise UsageError(
            f"{len(costs)} stage costs are given for a schedule of {num_stages} stages",
            hint="give one per stage, or a single one for all",
        )
    return tuple(costs)


def _check_costs(costs: object) -> None:
    listed: list[object] = [*costs] if isinstance(costs, Sequence) else [costs]
    wrong = [one for one in listed if not isinstance(one, StageCost)]
    if wrong:
        raise WrongType(
            f"what stages cost is given as `StageCost`s, got {kind_of(wrong[0])}",
            hint="give one for all stages, or a sequence of one per stage",
        )
