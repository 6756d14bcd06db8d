"""What the estimate rung found out about all plans of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from automesh.hardware.fabric import Fabric, Layouts
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Every plan with its estimate, or with why it has none.

    Attributes:
      found: plans that have an estimate.
      missing: the others, with one sentence each.
      origin: where the speeds come from, in words: `data sheet of TPU v5p`.
      notices: what the user should know, one sentence each.
      propagations: how many propagations the terms come from, those kept from earlier included.
      fabric: how the devices are wired; None if that could not be told.
      layouts: where the meshes of all plans lie on them; None without a fabric, or without a plan.
    """

    found: Mapping[Plan, Estimated] = field(default_factory=dict[Plan, Estimated])
    missing: Mapping[Plan, str] = field(default_factory=dict[Plan, str])
    origin: str = ""
    notices: tuple[str, ...] = ()
    propagations: int = 0
    fabric: Fabric | None = None
    layouts: Layouts | None = None
