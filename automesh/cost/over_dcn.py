"""Finds axes that do not split the batch, but cross the network between granules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from automesh.cost.terms import Finding, Monomial, Terms
from automesh.units import format_seconds

AXIS_OVER_DCN = "axis-over-dcn"


class _Priced(Protocol):
    """A collective on one mesh: the attributes of `CollectiveCost` that are read here."""

    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def source(self) -> str: ...
    @property
    def count(self) -> float: ...
    @property
    def payload_bytes(self) -> float: ...
    @property
    def dcn_s(self) -> float: ...
    @property
    def granules(self) -> int: ...


def over_dcn(terms: Terms, collectives: Iterable[_Priced]) -> Iterator[Finding]:
    """Finds, for each such axis, its collectives over DCN; the line is that of the slowest.

    Data-parallel axes send gradients once a step, and are meant to cross DCN. An axis that splits
    weights or a sequence sends activations in every layer, forth and back.

    Args:
      collectives: priced on the mesh in question.
    """
    crossing = [one for one in collectives if one.granules > 1 and one.dcn_s > 0]
    for axis in terms.active:
        mine = [one for one in crossing if axis in one.axes]
        mine = [one for one in mine if not set(one.axes) & set(terms.batch_axes)]
        if axis in terms.batch_axes or not mine:
            continue
        slowest = max(mine, key=lambda one: one.dcn_s)
        count = sum(one.count for one in mine)
        sent = sum(one.count * one.payload_bytes for one in mine)
        yield Finding(
            rule=AXIS_OVER_DCN,
            array="its activations",
            bytes=(Monomial(coefficient=sent / count),),
            axes=(axis,),
            count=(Monomial(coefficient=count),),
            source=slowest.source,
            detail=f"{slowest.granules} {format_seconds(sum(one.dcn_s for one in mine))}",
        )
