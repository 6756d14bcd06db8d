"""The replay of one plan of a study as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import os
from pathlib import Path

from automesh.cost.replay.trace import trace_json
from automesh.errors import UsageError
from automesh.hardware.model import hardware_model
from automesh.hlo.store import default_store
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failed
from automesh.report.files.csv import write_text
from automesh.tuner.compile.replay import Player
from automesh.tuner.explain.mesh import find_plan
from automesh.tuner.explain.study import layouts_of
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.metadata import reading


def write_trace(study: Path, mesh: str, path: Path, *, results: Path, storage: str) -> Plan:
    """Replays a compiled plan of a study again, and writes what happened when.

    Args:
      mesh: which plan; knobs may follow.

    Returns:
      The plan.

    Raises:
      UsageError: no such study, nothing in it was compiled for absent devices, no such plan, its
        program is not in the store any more, or the file cannot be written.
    """
    with reading(study, results=results, storage=storage) as (folder, opened, header):
        result = assemble(opened, header)
    compiled = {
        one.plan: one.outcome
        for one in result.candidates
        if isinstance(one.outcome, Compiled) and one.outcome.replay is not None
    }
    if header.fabric is None or not compiled:
        raise UsageError(
            f"nothing in the study in `{folder}` was replayed, so there is no trace to write",
            hint="a search for devices that are not here replays what it compiles: `automesh "
            "search SCRIPT --target v5e:4x4`",
        )
    plan, _ = find_plan(mesh, list(compiled), num_devices=header.device_count)
    fabric = header.fabric
    player = Player(
        store=default_store(os.environ),
        hardware=hardware_model(
            fabric,
            layouts_of(fabric, header.platform, header.device_kind, [plan]),
            platform=header.platform,
            device_kind=header.device_kind,
            environ=os.environ,
        ),
    )
    played = player.play(plan, compiled[plan])
    if isinstance(played, Failed):
        raise UsageError(played.reason)
    replayed, timeline = played
    notes = [
        ("plan", str(plan)),
        ("target", header.target),
        ("speeds", player.hardware.speeds.origin),
    ]
    notes += [("not counted", what) for what in replayed.uncounted]
    text = trace_json(timeline, name=f"{plan} on {header.target}", notes=notes)
    write_text(text, path, hint="name a file in a folder that you may write to")
    return plan
