"""The drawings of the page: timelines of the best plans, and the places of their devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from automesh.cost.replay.timeline import Timeline
from automesh.errors import AutomeshError
from automesh.hardware import chip_for
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.fabric.placement import Placement
from automesh.hardware.model import HardwareModel
from automesh.hlo.store import default_store
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failed, PipelineOutcome
from automesh.pipeline.simulate import Simulated
from automesh.report import words
from automesh.report.html.nouns import DrawnTimeline, HeldActivations, Placed, Section, Wiring
from automesh.report.result import Candidate, SearchResult
from automesh.tuner.compile.pipelines import predicted_timeline
from automesh.tuner.compile.replay import Player

MOST_TIMELINES = 3
MOST_DEVICES = 2048
"""Most devices drawn for one plan; with more, the squares would be too small."""
MOST_GRANULES = 8
_PLACE = 4  # x, y, z and core


def timelines_of(
    result: SearchResult, hardware: HardwareModel | None, left_out: dict[Section, str]
) -> tuple[DrawnTimeline, ...]:
    """Returns the timelines of the best plans: their replays, or the schedules of pipelines without
    a replay.

    Args:
      hardware: the devices, with the layouts of these plans.
      left_out: gets a sentence under `timelines` if nothing or only a part can be drawn.
    """
    drawn: list[DrawnTimeline] = []
    problems: list[str] = []
    for candidate in _chosen(result):
        compiled = words.compiled_of(candidate)
        if compiled is None:
            continue
        try:
            found = _timeline(candidate.plan, compiled, result, hardware)
        except AutomeshError as error:
            problems.append(str(error))
            continue
        if isinstance(found, Failed):
            problems.append(found.reason)
        elif found is not None:
            drawn.append(found)
    if problems:
        left_out["timelines"] = problems[0]
    elif not drawn:
        left_out["timelines"] = (
            "schedules are replayed for accelerators, here or not, and pipelines are simulated; "
            "this search measured whole steps"
        )
    return tuple(drawn)


def _chosen(result: SearchResult) -> list[Candidate]:
    ranked = [one for one in result.candidates if words.is_ranked(one)]
    able = [one for one in ranked if _is_drawable(one)]
    best = able[:MOST_TIMELINES]
    return best + [one for one in able[MOST_TIMELINES:] if one.is_baseline]


def _is_drawable(candidate: Candidate) -> bool:
    compiled = words.compiled_of(candidate)
    if compiled is None or compiled.same_as:
        return False
    return compiled.replay is not None or compiled.pipeline is not None


def _timeline(
    plan: Plan, compiled: Compiled, result: SearchResult, hardware: HardwareModel | None
) -> DrawnTimeline | Failed | None:
    pipeline = compiled.pipeline
    if compiled.replay is not None and hardware is not None:
        player = Player(store=default_store(os.environ), hardware=hardware)
        played = player.play(plan, compiled)
        if isinstance(played, Failed):
            return played
        held = _held_in(played[1], pipeline) if pipeline is not None else ()
        return _drawn(plan, "replay", played[1], held)
    if pipeline is None:
        return None
    chip = chip_for(result.facts.devices.kind, result.facts.devices.platform)
    timeline, simulated = predicted_timeline(pipeline, chip)
    return _drawn(plan, "schedule", timeline, _held(simulated, pipeline))


def _drawn(
    plan: Plan,
    kind: Literal["replay", "schedule"],
    timeline: Timeline,
    held: tuple[HeldActivations, ...],
) -> DrawnTimeline:
    return DrawnTimeline(plan=plan, kind=kind, timeline=timeline, held=held)


def _held(simulated: Simulated, pipeline: PipelineOutcome) -> tuple[HeldActivations, ...]:
    """Returns the activations that each rank holds, on its device with the most."""
    size = {
        rank: max((one.activation_bytes for one in pipeline.stages if one.rank == rank), default=0)
        for rank in range(len(simulated.held))
    }
    return tuple(
        HeldActivations(rank=rank, at_s=one.at_s, bytes=one.activations * size[rank])
        for rank, moments in enumerate(simulated.held)
        for one in moments
    )


def _held_in(timeline: Timeline, pipeline: PipelineOutcome) -> tuple[HeldActivations, ...]:
    """Returns the same from a drawn step: a microbatch is held from its `F` until its `B` or `W`
    ends."""
    held: list[HeldActivations] = []
    for rank in range(len(pipeline.actions)):
        size = max((one.activation_bytes for one in pipeline.stages if one.rank == rank), default=0)
        # `F3@5` and `F3`: the kind of an action is its first letter.
        actions = [
            one for one in timeline.slices if one.track == f"rank {rank}" and one.kind == "work"
        ]
        frees = "W" if any(one.name.startswith("W") for one in actions) else "B"
        moments = [(one.start_s, 1) for one in actions if one.name.startswith("F")]
        moments += [(one.start_s + one.seconds, -1) for one in actions if one.name[0] == frees]
        number = 0
        for at_s, change in sorted(moments):
            number = max(number + change, 0)
            held.append(HeldActivations(rank=rank, at_s=at_s, bytes=number * size))
    return tuple(held)


def wiring_of(fabric: Fabric) -> Wiring:
    """Returns the links of the devices, in plain values."""
    return Wiring(
        kind=fabric.kind,
        torus=fabric.torus,
        wraps=fabric.wraps,
        devices_per_chip=fabric.devices_per_chip,
        granules=fabric.num_granules,
        drawn_granules=min(fabric.num_granules, MOST_GRANULES),
        granule_devices=fabric.granule_devices,
    )


def placed(
    plans: Sequence[Plan],
    fabric: Fabric | None,
    hardware: HardwareModel | None,
    left_out: dict[Section, str],
) -> tuple[Placed, ...]:
    """Returns the places of the plans' devices: of many granules the first, of a large one its
    first planes.

    Args:
      hardware: the devices, with the layouts of the plans.
      left_out: gets a sentence under `placements` if there is nothing to draw.
    """
    if fabric is None or hardware is None:
        left_out["placements"] = "the study does not say how its devices are linked"
        return ()
    found: list[Placed] = []
    for plan in plans:
        try:
            found.append(_placed(plan, fabric, hardware))
        except AutomeshError as error:
            left_out["placements"] = str(error)
    return tuple(found)


def _placed(plan: Plan, fabric: Fabric, hardware: HardwareModel) -> Placed:
    placement = Placement(plan.axes, fabric, hardware.layouts)
    granule, place = placement.granule, placement.place
    shown = granule < MOST_GRANULES
    per_granule = MOST_DEVICES // min(fabric.num_granules, MOST_GRANULES)
    if fabric.granule_devices > per_granule:
        # Whole planes of a torus, whole rows of anything else.
        order = np.lexsort(tuple(place[:, column] for column in range(_PLACE)))
        inside = np.zeros(len(granule), np.int64)
        for number in range(min(fabric.num_granules, MOST_GRANULES)):
            mine = order[granule[order] == number]
            inside[mine] = np.arange(len(mine))
        shown &= inside < per_granule
    devices = np.flatnonzero(shown)
    return Placed(
        plan=plan,
        axes=tuple((axis.name, axis.size) for axis in plan.axes),
        devices=tuple(int(one) for one in devices),
        granule=tuple(int(one) for one in granule[devices]),
        place=tuple(
            (int(x), int(y), int(z), int(core)) for x, y, z, core in place[devices].tolist()
        ),
    )
