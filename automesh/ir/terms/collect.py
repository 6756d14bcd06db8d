"""Turns a partitioned program into `Terms`: kernels, collectives and memory as formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from automesh.collectives import why_unpriced
from automesh.cost.terms import (
    CollectiveTerm,
    HostTransfer,
    Kernel,
    Monomial,
    Region,
    Sum,
    Terms,
    Uncounted,
    flops,
    value_of,
)
from automesh.hlo.work.uncounted import remark_on_counted, unpriced_arithmetic
from automesh.ir.findings.nouns import PartitionedProgram, StepState
from automesh.ir.findings.registry import program_findings
from automesh.ir.fusion import Fusion, fuse, settled
from automesh.ir.graph import Block, Graph, Operation, multiplied
from automesh.ir.kernel_cost import cost_of, matmuls_of, moved
from automesh.ir.memory.liveness import memory_points
from automesh.ir.memory.spread import spread_of
from automesh.ir.op_kinds import COLLECTIVES, NO_WORK
from automesh.ir.passes.collectives import gather_by_dimension
from automesh.ir.passes.offload import computes_on_host, is_move, is_to_host
from automesh.ir.passes.run import rewrite
from automesh.ir.passes.windowed import WINDOWED
from automesh.ir.terms.collectives import Places, collective_term, combined, has_slots, slots_of
from automesh.outcomes import NO_COST, NO_PRICE, UNKNOWN_LENGTH
from automesh.platforms import platform_named

# Operations without a price are reported instead of counted as free.

# Custom calls that multiply no matrices and move only their operands and results.
_PLAIN_TARGETS = frozenset(
    (
        "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "TopK",
        "PartialReduce", "ApproxTopK", "annotate_device_placement", "xla.sdy.FuncResultSharding",
        "LayoutConstraint", "CreateBuffer", "Pin", "Unpin", "mhlo.topk", "topk",
    )
)  # fmt: skip


def uncounted_in(operation: Operation) -> list[Uncounted]:
    """Lists what the terms do not contain of one operation, without its bodies."""
    name, source = operation.name, operation.source
    found: list[Uncounted] = []
    if name == "while" and operation.trips is None:
        place = source or operation.attributes.get("condition_source", "")
        found.append(
            Uncounted(
                what=f"loop {UNKNOWN_LENGTH}",
                why="how often it runs depends on the data: its body is counted once",
                source=place,
            )
        )
    elif computes_on_host(operation):
        why = f"the host would do it, whose work {NO_PRICE}"
        found.append(Uncounted(what=f"{name} of values in host memory", why=why, source=source))
    elif name == "custom_call":
        found += _custom_call(operation)
    elif why := why_unpriced(name):
        found.append(Uncounted(what=name, why=why, source=source))
    if arithmetic := unpriced_arithmetic(name, operation.attributes.get("target", "")):
        why = "only its bytes are counted"
        found.append(Uncounted(what=arithmetic, why=why, source=source))
    if operation.attributes.get("exact") is False:
        found.append(
            Uncounted(
                what=f"{name} over groups that are no product of mesh axes",
                why="it is priced as if its members lay along these axes",
                source=source,
            )
        )
    return found


def _custom_call(operation: Operation) -> list[Uncounted]:
    target = operation.attributes.get("target", "")
    if is_move(operation):  # A transfer, or on CPUs nothing at all.
        return []
    if not operation.results:  # Output, such as `jax.debug.print`: no device computes it.
        return []
    if counted := operation.attributes.get("counted"):
        return [
            Uncounted(
                what=f"custom call {target}",
                why=f"it states no cost: {remark_on_counted(counted)}",
                source=operation.source,
            )
        ]
    if target in _PLAIN_TARGETS or "flops" in cost_of(operation):
        return []
    return [
        Uncounted(
            what=f"custom call {target}",
            why=f"it states no cost: {NO_COST} as traffic",
            source=operation.source,
        )
    ]


# Weights to choose the costliest branch of a conditional: bytes per FLOP, and bytes in memory per
# byte over a link. Rough figures that fit every accelerator of the chip table.
_BYTES_PER_FLOP = 1.0 / 200.0
_LINK_BYTES_PER_BYTE = 20.0
_ONCE: Sum = (Monomial(coefficient=1.0),)


_UNKNOWN_STATE = StepState()


def collect(
    graph: Graph,
    *,
    active: tuple[str, ...],
    platform: str,
    state: StepState = _UNKNOWN_STATE,
) -> Terms:
    """Collects the work of one device in a step; the caller adds the guards.

    Args:
      graph: as imported; changed in place by the platform's rewrites.
      active: axes larger than 1, in the order of the mesh.
      platform: whose compiler's rewrites are applied: cpu, gpu or tpu; `none` for the module as
        partitioned.
      state: the arguments and results that are the state of the step.
    """
    rewrite(graph, platform)
    program = PartitionedProgram(graph=graph, platform=platform, state=state)
    findings = tuple(dict.fromkeys(program_findings(program)))
    if platform in ("none", "cpu"):
        gather_by_dimension(graph)
    fusion = fuse(graph, None if platform == "none" else platform_named(platform))
    part = _Collector(graph, fusion, platform).block(graph.top, region=0, count=_ONCE)
    memory = memory_points(graph, stored=fusion.stored, platform=platform)
    return Terms(
        active=active,
        sampled=tuple((axis, size) for axis, size in graph.mesh if axis in active),
        platform=platform,
        regions=(Region(name="step", trips=_ONCE), *part.regions),
        kernels=tuple(part.kernels),
        collectives=tuple(part.collectives),
        points=memory.points,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        alias_bytes=memory.alias_bytes,
        on_chip_bytes=memory.on_chip_bytes,
        reread_bytes=memory.reread_bytes,
        host_transfers=tuple(part.host_transfers),
        uncounted=tuple(dict.fromkeys(part.uncounted)),
        findings=findings,
        memory_spread=spread_of(
            graph, platform, has_unknown=any(NO_COST in one.why for one in part.uncounted)
        ),
    )


@dataclass(slots=True, kw_only=True)
class _PartialTerms:
    """The terms of some operations, before they are complete."""

    kernels: list[Kernel] = field(default_factory=list[Kernel])
    collectives: list[CollectiveTerm] = field(default_factory=list[CollectiveTerm])
    host_transfers: list[HostTransfer] = field(default_factory=list[HostTransfer])
    regions: list[Region] = field(default_factory=list[Region])
    uncounted: list[Uncounted] = field(default_factory=list[Uncounted])

    def add(self, other: _PartialTerms) -> None:
        self.kernels += other.kernels
        self.collectives += other.collectives
        self.host_transfers += other.host_transfers
        self.regions += other.regions
        self.uncounted += other.uncounted


class _Collector:
    def __init__(self, graph: Graph, fusion: Fusion, platform: str) -> None:
        self._fusion, self._platform = fusion, platform
        self._settled = settled(graph, fusion)
        self._sizes = dict(graph.mesh)
        self._next_region = 1
        self._names = {0: "step"}

    def block(self, block: Block, *, region: int, count: Sum) -> _PartialTerms:
        part = _PartialTerms()
        moved: list[tuple[Operation, CollectiveTerm]] = []
        places = self._places(block, region, count, part)
        for operation in block.operations:
            region = places.at(operation)
            part.uncounted += uncounted_in(operation)
            if operation.name == "while":
                part.add(self._loop(operation, count))
            elif operation.name == "case":
                part.add(self._branches(operation, region, count))
            elif operation.name in COLLECTIVES:
                term = collective_term(
                    operation,
                    count=count,
                    platform=self._platform,
                    places=places,
                    sizes=self._sizes,
                )
                if term is not None:
                    moved.append((operation, term))
            elif is_move(operation):
                part.host_transfers += self._host_copy(operation, places, count)
            elif kernel := self._kernel(operation, region, count):
                part.kernels.append(kernel)
        part.collectives += combined(block, moved, self._platform, self._sizes)
        return part

    def _places(self, block: Block, region: int, count: Sum, part: _PartialTerms) -> Places:
        """Assigns the operations of a block to regions, which it makes."""
        if not has_slots(self._platform):
            return Places(regions=(region,))
        slots = slots_of(block)
        more = range(self._next_region, self._next_region + slots.count - 1)
        self._next_region += len(more)
        part.regions += [Region(name=self._names[region], trips=count) for _ in more]
        for number in more:
            self._names[number] = self._names[region]
        return Places(regions=(region, *more), slots=slots)

    def _kernel(self, operation: Operation, region: int, count: Sum) -> Kernel | None:
        if operation.name in NO_WORK:
            return None
        traffic = moved(operation, self._fusion)
        matmuls = matmuls_of(operation)
        if traffic is None or not (traffic.bytes or matmuls):
            return None
        return Kernel(
            region=region,
            count=count,
            bytes=traffic.bytes,
            matmuls=matmuls,
            windowed=operation.attributes.get(WINDOWED, ()),
            near=traffic.near(self._settled),
            epilogue=traffic.epilogue,
            operation=_words(operation, self._fusion),
            source=operation.source,
        )

    def _host_copy(self, move: Operation, places: Places, count: Sum) -> Iterator[HostTransfer]:
        """Returns the copy that a move makes; none if the value is there already."""
        is_away = is_to_host(move)
        if move.operands[0].on_host != is_away and move.results[0].on_host == is_away:
            yield HostTransfer(
                regions=places.regions,
                count=count,
                bytes=(move.operands[0].bytes,),
                is_to_host=is_away,
                source=move.source,
            )

    def _loop(self, loop: Operation, count: Sum) -> _PartialTerms:
        trips = loop.times
        inside = count if trips is None else multiplied(count, trips)
        number = self._next_region
        self._next_region += 1
        place = loop.source or loop.attributes.get("condition_source", "")
        name = f"loop at {place}" if place else "loop"
        self._names[number] = name
        part = _PartialTerms(regions=[Region(name=name, trips=inside)])
        part.add(self.block(loop.bodies[0], region=number, count=inside))
        return part

    def _branches(self, case: Operation, region: int, count: Sum) -> _PartialTerms:
        before = self._next_region
        parts: list[_PartialTerms] = []
        for body in case.bodies:
            self._next_region = before
            parts.append(self.block(body, region=region, count=count))
        worst = max(parts, key=self._weight, default=_PartialTerms())
        self._next_region = before + len(worst.regions)
        if any(self._weight(part) != self._weight(worst) for part in parts):
            worst.uncounted.append(
                Uncounted(
                    what="conditional",
                    why="which branch runs depends on the data: the most expensive one is counted",
                    source=case.source,
                )
            )
        return worst

    def _weight(self, part: _PartialTerms) -> float:
        sizes = self._sizes
        kernels = sum(
            value_of(kernel.count, sizes)
            * (flops(kernel.matmuls, sizes) * _BYTES_PER_FLOP + value_of(kernel.bytes, sizes))
            for kernel in part.kernels
        )
        links = sum(
            value_of(collective.count, sizes) * value_of(collective.payload_bytes, sizes)
            for collective in part.collectives
        )
        return kernels + links * _LINK_BYTES_PER_BYTE


def _words(operation: Operation, fusion: Fusion) -> str:
    if operation.name == "custom_call":
        return f"custom_call {operation.attributes.get('target', '')}".strip()
    is_fusion = operation.results and operation.results[0] in fusion.inputs
    return "fusion" if is_fusion else operation.name
