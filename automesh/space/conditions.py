"""A condition that a plan must meet, for thousands of meshes at once or for one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.limits import LARGEST_INTEGER
from automesh.mesh.plan_arrays import Sizes
from automesh.space.space import AxisRange, Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRule:
    """A relation between a product of axes and integer knobs, and a number.

    Attributes:
      name: stable, for counting: `tp max 16`, `dp*fsdp divides batch`, `axis ep unused by the
        step`.
      fact: name of the fact whose value is `bound`; empty if the space gives the number.
    """

    name: str
    factors: tuple[str, ...]
    relation: Relation
    bound: int
    fact: str = ""

    def holds(self, values: Mapping[str, Sizes]) -> NDArray[np.bool_]:
        """Says which rows of `values` (name -> sizes, all of one shape) meet the rule."""
        factors = [np.asarray(values[name]) for name in self.factors]
        largest = math.prod(int(np.abs(one).max(initial=1)) for one in factors)
        # Beyond 64 bits numpy would wrap around: then with Python's integers.
        if max(largest, abs(self.bound)) > LARGEST_INTEGER:
            factors = [one.astype(object) for one in factors]
        product = np.prod(factors, axis=0)
        match self.relation:
            case "size":
                return product == self.bound
            case "max":
                return product <= self.bound
            case "min":
                return product >= self.bound
            case "divides":
                # 0 divides nothing.
                return (product != 0) & (self.bound % np.where(product == 0, 1, product) == 0)

    def detail(self, values: Mapping[str, int]) -> str:
        """Describes the numbers of one plan that the rule rejects."""
        product = math.prod(int(values[name]) for name in self.factors)
        bound = f"{self.fact} = {self.bound}" if self.fact else str(self.bound)
        wanted = {
            "size": f"must be {bound}",
            "max": f"at most {bound} is allowed",
            "min": f"at least {bound} is asked for",
            "divides": f"does not divide {bound}",
        }[self.relation]
        return f"{'*'.join(self.factors)} is {product}, {wanted}"


def rules_of_axes(
    axes: Sequence[AxisRange], used_axes: Collection[str], *, sometimes: Collection[str] = ()
) -> list[SpaceRule]:
    """Makes the rules that follow from the step's use of the axes, and from the axes' bounds.

    Args:
      sometimes: axes that the step uses under another mapping.
    """
    rules = [
        SpaceRule(
            name=f"axis {axis.name} unused by the "
            + ("mapping" if axis.name in sometimes else "step"),
            factors=(axis.name,),
            relation="size",
            bound=1,
        )
        for axis in axes
        if axis.name not in used_axes
    ]
    for axis in axes:
        bounds: list[tuple[Relation, int]] = []
        if axis.minimum == axis.maximum:
            bounds.append(("size", axis.minimum))
        else:
            if axis.minimum > 1:
                bounds.append(("min", axis.minimum))
            if axis.maximum:
                bounds.append(("max", axis.maximum))
        rules += [
            SpaceRule(
                name=f"{axis.name} {relation} {bound}",
                factors=(axis.name,),
                relation=relation,
                bound=bound,
            )
            for relation, bound in bounds
        ]
    return rules
