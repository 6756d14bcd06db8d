"""The rule about products that no part of an axis divides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from automesh.cost.terms import Finding
from automesh.ir.findings.nouns import (
    LEAST_BYTES,
    OperationSite,
    PartitionedProgram,
    words,
    work_of,
)
from automesh.ir.findings.rule import (
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    axes_of,
    bytes_of,
    parts,
)
from automesh.ir.graph import Operation
from automesh.ir.op_kinds import PRODUCTS
from automesh.ir.terms.collectives import nearby_source

REPEATED_WORK = "repeated-work"
# Shown if a device does this part of its multiplications as all others along the axis do.
_SHARE = 0.25


@dataclass(slots=True)
class _Repeated:
    """The products that an axis does not divide.

    Attributes:
      work: multiplications of one device.
      places: of these at one line.
    """

    work: float = 0.0
    places: dict[str, list[tuple[float, OperationSite]]] = field(default_factory=dict)


def repeated_work(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds mesh axes along which all devices do the same multiplications.

    Products for which a weight is gathered are left out: `undivided-operation` has these. Inside
    `jax.shard_map` what a device does is what the script says.
    """
    sizes = program.sizes
    total = 0.0
    found = {axis: _Repeated() for axis, size in program.graph.mesh if size > 1}
    for seen in program.operations():
        operation = seen.operation
        if operation.name not in PRODUCTS:
            continue
        axes = _dividing(program, operation)
        work = work_of(program, seen) / parts(axes, sizes)
        total += work
        for axis in found.keys() - axes:
            found[axis].work += work
            place = operation.source or nearby_source(operation)
            found[axis].places.setdefault(place, []).append((work, seen))
    for axis, repeated in found.items():
        if not total or repeated.work < _SHARE * total:
            continue
        large = [
            [one for one in some if one[1].operation.results[0].global_bytes >= LEAST_BYTES]
            for some in repeated.places.values()
        ]
        at_line = max(large, key=lambda some: sum(work for work, _ in some))
        if not at_line:
            continue
        _, seen = max(at_line, key=lambda one: one[0])
        result = seen.operation.results[0]
        yield Finding(
            rule=REPEATED_WORK,
            array=words(result),
            bytes=(result.bytes,),
            axes=(axis,),
            count=seen.count,
            source=seen.operation.source or nearby_source(seen.operation),
            detail=f"{round(100 * repeated.work / total)} %",
        )


def _dividing(program: PartitionedProgram, operation: Operation) -> set[str]:
    """Returns the axes that give the devices along them different parts of a product."""
    axes = set[str]()
    for value in (*operation.operands, *operation.results):
        axes.update(value.manual, value.in_part, *value.axes)
    for operand in operation.operands:
        maker = program.maker(operand)
        if maker is not None and maker.name == "slice":  # The padding of uneven parts is cut off.
            maker = maker.operands[0].producer
        if maker is not None and maker.name == "all_gather" and not maker.attributes.get("manual"):
            axes.update(maker.attributes["axes"])
    return axes


def _repeated_work_words(finding: Finding, sizes: Sizes) -> str:
    devices = math.prod(sizes.get(axis, 1) for axis in finding.axes)
    which = "both" if devices == 2 else f"all {devices}"
    return (
        f"{which} devices along {axes_of(finding)} do the same {finding.detail} of a "
        f"device's multiplications; most of it at this line, for {array_of(finding)}, "
        f"{bytes_of(finding, sizes)} on every device"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name=REPEATED_WORK,
        check=WholeProgramCheck(repeated_work),
        title="repeated work",
        what=_repeated_work_words,
        why="nothing that these products read or make is split over the axis: an operation before "
        "them left the rows whole, or the batch or the weight was never split over it",
        cure=advice(
            "split the rows again with `with_sharding_constraint` behind the operation that left "
            "them whole, or let the axis split the batch or a weight of this line too"
        ),
    ),
)
