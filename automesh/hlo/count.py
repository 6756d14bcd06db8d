"""Counts what one device does in one step of a compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from automesh.hlo.collectives import kind_of, transfer_of
from automesh.hlo.flops import flops_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.spans import Axes
from automesh.hlo.traffic import traffic_of
from automesh.hlo.trips import trip_count
from automesh.outcomes import Collective, Counts

# Custom calls that multiply no matrices and move only their operands and results.
_PLAIN_TARGETS = frozenset({"TopK", "AllocateBuffer", "ConcatBitcast", "PartialReduce"})
_HOST = frozenset({"send", "recv", "infeed", "outfeed"})
_OTHER_MATH = frozenset({"fft", "triangular-solve", "cholesky"})


def count(module: Module, axes: Sequence[tuple[str, int]]) -> Counts:
    """Counts FLOPs, memory traffic and collectives, with loops multiplied by their trips.

    Of a conditional the costliest branch counts. FLOPs are those of matrix multiplications and
    convolutions alone.

    Args:
      module: as one device runs it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.

    Raises:
      ValueError: a collective names a device that is outside the mesh.
    """
    tally = _Counting(module, tuple(axes)).of(module.entry_computation)
    order = {name: position for position, (name, _) in enumerate(axes)}
    collectives = [
        Collective(
            kind=kind,
            axes=spanned,
            group_size=size,
            count=moved.count,
            payload_bytes=moved.payload_bytes,
            wire_bytes=moved.wire_bytes,
        )
        for (kind, spanned, size), moved in tally.collectives.items()
    ]
    return Counts(
        flops=tally.flops,
        hbm_bytes=tally.hbm_bytes,
        collectives=tuple(
            sorted(collectives, key=lambda c: (c.kind, [order[a] for a in c.axes], c.group_size))
        ),
        uncounted=tuple(
            f"{text} ({times} times)" if times > 1 else text
            for text, times in sorted(tally.uncounted.items())
        ),
    )


@dataclass(slots=True)
class _Moved:
    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0


@dataclass(slots=True)
class _Tally:
    """What has been counted so far; `collectives` by kind, axes and size of the group."""

    flops: int = 0
    hbm_bytes: int = 0
    collectives: dict[tuple[str, tuple[str, ...], int], _Moved] = field(default_factory=dict)
    uncounted: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Tally, times: int) -> None:
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for key, moved in other.collectives.items():
            self.move(
                key, moved.count * times, moved.payload_bytes * times, moved.wire_bytes * times
            )
        for text, occurrences in other.uncounted.items():
            self.uncounted[text] += occurrences * times

    def move(
        self, key: tuple[str, tuple[str, ...], int], count: int, payload: int, wire: int
    ) -> None:
        if count == 0:
            return
        moved = self.collectives.setdefault(key, _Moved())
        moved.count += count
        moved.payload_bytes += payload
        moved.wire_bytes += wire


class _Counting:
    """One run of `count`: every computation is counted once and multiplied where it is called."""

    def __init__(self, module: Module, axes: Axes) -> None:
        self._module = module
        self._axes = axes
        self._known: dict[int, _Tally] = {}

    def of(self, computation: Computation) -> _Tally:
        """What one execution of `computation` and of all that it calls does."""
        if computation.id not in self._known:
            tally = _Tally()
            fused_channels: set[int] = set()
            for instruction in computation.instructions.values():
                self._add(tally, computation, instruction)
                if instruction.opcode == "fusion":
                    body = self._module.computations[instruction.called[0]]
                    self._add_fused(tally, body, fused_channels)
            self._known[computation.id] = tally
        return self._known[computation.id]

    def _add(self, tally: _Tally, computation: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode
        tally.hbm_bytes += traffic_of(self._module, computation, instruction)
        tally.flops += flops_of(computation, instruction)
        if opcode == "while":
            self._add_loop(tally, computation, instruction)
        elif opcode == "conditional":
            self._add_branch(tally, instruction)
        elif opcode in ("call", "async-start"):
            for callee in self._module.called(instruction):
                tally.add(self.of(callee), 1)
        elif kind_of(instruction):
            self._add_collective(tally, computation, instruction)
        elif opcode == "custom-call" and instruction.target not in _PLAIN_TARGETS:
            tally.uncounted[f"custom call `{instruction.target}`"] += 1
        elif opcode in _HOST:
            tally.uncounted[f"{opcode} to or from the host or another program"] += 1
        elif opcode in _OTHER_MATH:
            tally.uncounted[f"FLOPs of `{opcode}`"] += 1

    def _add_loop(self, tally: _Tally, computation: Computation, loop: Instruction) -> None:
        body, condition = self._module.called(loop)
        known = trip_count(self._module, computation, loop)
        if known.trips is None:
            tally.uncounted[f"loop {_label(loop)} of unknown length counted once"] += 1
        elif known.source == "assumed":
            tally.uncounted[
                f"loop {_label(loop)} taken to run {known.trips} times from 0 in steps of 1"
            ] += 1
        trips = 1 if known.trips is None else known.trips
        tally.add(self.of(body), trips)
        tally.add(self.of(condition), trips + 1)

    def _add_branch(self, tally: _Tally, conditional: Instruction) -> None:
        branches = [self.of(branch) for branch in self._module.called(conditional)]
        costliest = max(branches, key=lambda branch: (branch.flops, branch.hbm_bytes))
        tally.add(costliest, 1)
        if any(
            (branch.flops, branch.collectives) != (costliest.flops, costliest.collectives)
            for branch in branches
        ):
            label = _label(conditional)
            tally.uncounted[f"conditional {label} counted as its costliest branch"] += 1

    def _add_collective(
        self, tally: _Tally, computation: Computation, instruction: Instruction
    ) -> None:
        transfer = transfer_of(self._module, computation, instruction, self._axes)
        if transfer.span.group_size == 1:  # Nothing leaves the device.
            return
        key = (transfer.kind, transfer.span.axes, transfer.span.group_size)
        tally.move(key, 1, transfer.payload_bytes, transfer.wire_bytes)
        if transfer.unproven:
            tally.uncounted[transfer.unproven] += 1

    def _add_fused(self, tally: _Tally, body: Computation, channels: set[int]) -> None:
        """Adds the FLOPs and collectives inside a fusion.

        A TPU program repeats an asynchronous collective in every fusion that it overlaps with,
        under one channel.
        """
        for instruction in body.instructions.values():
            tally.flops += flops_of(body, instruction)
            channel = instruction.channel
            if kind_of(instruction) and (channel == 0 or channel not in channels):
                channels.add(channel)
                self._add_collective(tally, body, instruction)
            elif instruction.opcode == "fusion":
                inner = self._module.computations[instruction.called[0]]
                self._add_fused(tally, inner, channels)


def _label(instruction: Instruction) -> str:
    if not instruction.source_file:
        return f"`{instruction.name}`"
    place = f"{PurePath(instruction.source_file).name}:{instruction.source_line}"
    return f"`{instruction.name}` ({place})"
