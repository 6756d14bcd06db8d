"""Replays a scheduled program on hardware: how long a step takes, and what it waits for (no jax).

A model, with these simplifications: all devices do the same at the same time, so that one is
played; collectives do not slow down what the cores do, nor do they load the device's memory; a
branch is its costliest block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from automesh.cost.replay.engine import Played, play
from automesh.cost.replay.kernels import Kernels
from automesh.cost.replay.program import TICKS_PER_S, Await, Depart, Repeat, Step
from automesh.cost.replay.timeline import Timeline
from automesh.cost.replay.transfers import Flights
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.fabric.links import Pairs
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import (
    Block,
    Branch,
    Compute,
    Done,
    Loop,
    Schedule,
    Start,
    Transfer,
)
from automesh.hlo.schedule.totals import tally_of
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.outcomes import Replayed

# Every pattern may double the strands of a direction.
_TOLD_APART = 6


def replay(
    schedule: Schedule,
    *,
    axes: Sequence[MeshAxis],
    hardware: HardwareModel,
) -> tuple[Replayed, Timeline]:
    """Plays one step of a scheduled program.

    Args:
      axes: of the plan, in the order of the mesh.
      hardware: with the layout of the plan's ICI shape at least.

    Raises:
      AutomeshError: the layouts say nothing about the shape.
      ValueError: the program was read for another mesh.
    """
    if tuple((axis.name, axis.size) for axis in axes) != schedule.axes:
        read = ", ".join(f"{name}:{size}" for name, size in schedule.axes)
        raise ValueError(f"the program was read for the mesh {read}, not {format_mesh(axes)}")
    kernels = Kernels(schedule, hardware.fabric.chip, hardware.speeds)
    flights = Flights(axes, hardware, _patterns(schedule))
    played = play(_program(schedule.body, kernels, flights))
    uncounted = list(schedule.uncounted)
    if not schedule.is_ordered:
        uncounted.append("no schedule: operations stand in an order in which they can run")
    if kernels.trust is False:
        uncounted.append(
            "the compiler's cycles are far from the operations of its matrix products: "
            "priced by their sizes"
        )
    return _replayed(played, hardware.fabric, tuple(uncounted)), played.timeline


def _patterns(schedule: Schedule) -> list[Pairs]:
    """The patterns of messages between pairs that move the most."""
    moved: Counter[Pairs] = Counter()
    for one, times in _transfers(schedule.body, 1):
        if one.pairs:
            moved[one.pairs] += times * one.payload_bytes
    return [pairs for pairs, _ in moved.most_common(_TOLD_APART)]


def _transfers(block: Block, times: int) -> Iterator[tuple[Transfer, int]]:
    for one in block.operations:
        match one:
            case Start():
                yield one.transfer, times
            case Loop():
                yield from _transfers(one.body, times * one.trips)
            case Branch():
                for inner in one.blocks:
                    yield from _transfers(inner, times)
            case _:
                pass


def _program(block: Block, kernels: Kernels, flights: Flights) -> tuple[Step, ...]:
    steps: list[Step] = []
    for one in block.operations:
        match one:
            case Compute():
                steps.append(kernels.work(one))
            case Start():
                steps.append(Depart(flight=flights.flight(one.transfer), lane=one.lane))
            case Done():
                steps.append(Await(lane=one.lane))
            case Loop():
                body = _program(one.body, kernels, flights)
                steps.append(Repeat(name=one.name, trips=one.trips, body=body, source=one.source))
            case Branch():
                steps += _program(_costliest(one), kernels, flights)
    return tuple(steps)


def _costliest(branch: Branch) -> Block:
    """The block that `automesh.hlo.count` chooses: the one with the most FLOPs, then bytes.

    Not the one that takes longest: then a faster wire could make a step slower, by making another
    block the one that is played.
    """
    return max(branch.blocks, key=lambda block: tally_of(block).rank())


def _replayed(played: Played, fabric: Fabric, uncounted: tuple[str, ...]) -> Replayed:
    step_s = played.step / TICKS_PER_S
    possible = fabric.chip.flops_per_s * step_s
    return Replayed(
        step_s=step_s,
        bracket_s=(
            max(played.busy.values(), default=0) / TICKS_PER_S,
            max(played.serial, played.step) / TICKS_PER_S,
        ),
        causes=_seconds(played.causes),
        communication_s=_seconds(played.alone),
        busy_s=_seconds(played.busy),
        mfu=played.flops / possible if possible else 0.0,
        uncounted=uncounted,
    )


def _seconds(amounts: dict[str, int]) -> tuple[tuple[str, float], ...]:
    """(name, seconds), largest first."""
    ordered = sorted(amounts.items(), key=lambda one: (-one[1], one[0]))
    return tuple((name, amount / TICKS_PER_S) for name, amount in ordered)
