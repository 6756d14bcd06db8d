"""Random rules with the devices that a framework then finds, and what it must make of them.

Beside rules with all sizes given and a batch that divides there are such with sizes left open and
with any batch: what a framework cannot train with must have been refused by the export.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.infer import resolve_shape
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.shape import HybridMeshShape
from automesh.report.export.frameworks import JSON, export_rules, format_called, names
from plugins.frameworks.tests.support.cases.exports import (
    AXES,
    REMAT,
    TARGETS,
    WITHOUT_GRANULES,
    On,
    Read,
    Sizes,
    rules_for,
    used,
)

FRAMEWORKS = {name: format_called(name) for name in names() if name != JSON}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A rule to be exported.

    Attributes:
      rules: the rule, for a framework that keeps several with others beside it.
      match: of the rule.
      on: the devices that it is for.
      is_plain: all sizes are given and the batch divides, so that no framework refuses it.
    """

    rules: Rules
    match: str
    on: On
    is_plain: bool

    @property
    def rule(self) -> MeshRule:
        return next(rule for rule in self.rules.rules if rule.match == self.match)

    @property
    def knobs(self) -> dict[str, Any]:
        return dict(self.rule.knobs)

    @property
    def sizes(self) -> Sizes:
        """By automesh's names, all of them inferred."""
        shape = resolve_shape(
            self.rule.hybrid_shape,
            num_devices=self.on.num_devices,
            num_granules=self.on.num_granules,
        )
        pairs = zip(shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
        return used(dict(zip(self.rules.axes, pairs, strict=True)))


@st.composite
def orders_for(draw: st.DrawFn, framework: str) -> Order:
    rules = draw(rules_for(framework))
    (rule,) = rules.rules
    ici, dcn = list(rule.hybrid_shape.ici_mesh_shape), list(rule.hybrid_shape.dcn_mesh_shape)
    granules = math.prod(dcn)
    devices = math.prod(ici) * granules
    knobs = dict(rule.knobs)
    is_plain = True
    axis = st.integers(0, len(ici) - 1)
    if draw(st.integers(0, 3)) == 0:
        ici[draw(axis)] = -1
        is_plain = False
    if framework not in WITHOUT_GRANULES and draw(st.integers(0, 5)) == 0:
        dcn[draw(axis)] = -1
        is_plain = False
    # With open sizes a batch that does not divide is the framework's to refuse, when it trains.
    if is_plain and "batch" in knobs and draw(st.booleans()):
        rows = draw(st.one_of(st.integers(1, 3 * devices), st.integers(1, 100)))
        if framework == "maxtext":
            # The share of a device times the length of a row must be whole, says MaxText itself.
            rows *= _odd(Fraction(rows, devices * knobs["microbatches"]).denominator)
            # Its rows have 2,048 tokens: no device gets less than a 1,024th of one.
            rows *= max(Fraction(rows, devices * knobs["microbatches"]).denominator // 1024, 1)
        knobs["batch"] = rows
        is_plain = knobs["batch"] % (devices * knobs["microbatches"]) == 0
    rule = replace(rule, mesh_shape=HybridMeshShape(ici, dcn), knobs=knobs)
    others = tuple(
        replace(rule, match=match, mesh_shape=HybridMeshShape(ici[::-1], [1] * len(ici)))
        for match in (TARGETS if FRAMEWORKS[framework].many else ())
        if match != rule.match and draw(st.booleans())
    )
    at = draw(st.integers(0, len(others)))
    selector = rule.match.replace("(a|b)-.*", "b-8")
    return Order(
        rules=replace(rules, rules=(*others[:at], rule, *others[at:])),
        match=rule.match,
        on=On(num_devices=devices, num_granules=granules, selector=selector),
        is_plain=is_plain,
    )


def _odd(number: int) -> int:
    """Without its factors of 2."""
    return number // (number & -number)


def check(order: Order, name: str, read: Callable[[str, On], Read]) -> None:
    """The framework trains with what the rule says, or the export has refused the rule."""
    try:
        text = export_rules(order.rules, name)
    except UsageError as error:
        assert not order.is_plain, error
        return
    found = read(text, order.on)
    knobs = order.knobs
    assert used(found.sizes) == {AXES[name][axis]: size for axis, size in order.sizes.items()}, text
    if "remat" in knobs:
        assert found.remat == REMAT[name][knobs["remat"]], text
    if "microbatches" in knobs:
        assert found.accumulation == knobs["microbatches"], text
    if "batch" in knobs and name != "axlearn":
        # AXLearn's stands in a comment.
        assert found.global_batch == knobs["batch"], text
