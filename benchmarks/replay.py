"""How fast scheduled programs are replayed: the recorded modules of the tests, each several times.

    python -m benchmarks.replay [--repeats 5]

Read: from a serialized module to its schedule. Replay: from the schedule to seconds and timeline.
Executed: instructions that a device runs in one step, loops multiplied; of most trips the replay
only plays the first few. The last line on stdout is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from automesh.cost.replay.replay import replay
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import Branch, ScheduledBlock, ScheduledLoop
from tests.support.cases.replay_golden import ALL, Recorded
from tests.support.samples.replay_samples import layouts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One module; seconds are medians.

    Attributes:
      written: operations of the schedule.
      executed: by one device in one step.
    """

    name: str
    written: int
    executed: int
    read_s: float
    replay_s: float


def measured(one: Recorded, repeats: int) -> Timed:
    """Reads and replays one module again and again."""
    fabric = one.fabric
    layouts = layouts_of(fabric, one.axes)
    speeds = datasheet_speeds(fabric.chip, fabric)
    schedule = one.schedule()
    read_s: list[float] = []
    replay_s: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        one.schedule()
        between = time.perf_counter()
        replay(
            schedule,
            axes=one.axes,
            hardware=HardwareModel(fabric=fabric, layouts=layouts, speeds=speeds),
        )
        read_s.append(between - start)
        replay_s.append(time.perf_counter() - between)
    written, executed = _operations(schedule.body)
    return Timed(
        name=one.name,
        written=written,
        executed=executed,
        read_s=statistics.median(read_s),
        replay_s=statistics.median(replay_s),
    )


def _operations(block: ScheduledBlock) -> tuple[int, int]:
    """Operations as written, and as executed."""
    written = executed = 0
    for one in block.operations:
        if isinstance(one, ScheduledLoop):
            inner = _operations(one.body)
            written, executed = written + inner[0], executed + one.trips * inner[1]
        elif isinstance(one, Branch):
            inner = max(map(_operations, one.blocks), key=lambda counts: counts[1])
            written, executed = written + inner[0], executed + inner[1]
        else:
            written, executed = written + 1, executed + 1
    return written, executed


def main(repeats: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """Prints a table, then the totals as JSON."""
    print(f"{'module':<24}{'written':>9}{'executed':>10}{'read ms':>10}{'replay ms':>11}")
    timed = [measured(one, repeats) for one in ALL]
    for one in timed:
        print(
            f"{one.name:<24}{one.written:>9}{one.executed:>10}"
            f"{one.read_s * 1e3:>10.1f}{one.replay_s * 1e3:>11.1f}"
        )
    seconds = sum(one.replay_s for one in timed)
    print(
        json.dumps(
            {
                "modules": len(timed),
                "instructions": sum(one.executed for one in timed),
                "instructions_per_s": round(sum(one.executed for one in timed) / seconds),
                "written_per_s": round(sum(one.written for one in timed) / seconds),
                "read_s": round(sum(one.read_s for one in timed), 4),
                "replay_s": round(seconds, 4),
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
