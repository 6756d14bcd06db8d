"""The replay of programs that ran, beside the kernels that they ran."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from automesh.cost.replay.program import TICKS_PER_S
from automesh.cost.replay.replay import InstructionPrices, replay
from automesh.hardware.model import HardwareModel
from automesh.hlo import read_module
from automesh.hlo.schedule.nouns import Compute, executed
from automesh.hlo.schedule.read import read_schedule
from automesh.mesh.axes import MeshAxis
from automesh.units import format_seconds
from benchmarks.attached.record import Record
from benchmarks.attached.trace import AXES, shares

# What traces call copies that XLA leaves to CUDA.
_CUDA_COPIES = ("memcpy32_post", "MemcpyD2D")
_MOST = 12  # kernels that are told by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One program that ran, traced and replayed.

    Attributes:
      measured_s: of a step, in the visits; 0 if it was not measured.
      busy_s: of its kernels, one step.
      multiplying_s: of those that multiply matrices.
      replay_s: of its schedule.
      replayed_multiplying_s: of what multiplies in it.
      kernels: name, traced and replayed seconds of what has one name in both, the longest first.
      copied_s, replayed_copies_s: of copies that CUDA does, traced; and replayed, with the fusions
        that have no kernel of their own, since they only move rows of an array.
    """

    step: str
    plan: str
    measured_s: float
    busy_s: float
    multiplying_s: float
    replay_s: float
    replayed_multiplying_s: float
    kernels: tuple[tuple[str, float, float], ...] = ()
    copied_s: float = 0.0
    replayed_copies_s: float = 0.0

    @property
    def error(self) -> float:
        """Of the replay against the measured step, relative, with its sign."""
        return self.replay_s / self.measured_s - 1 if self.measured_s else 0.0

    @property
    def kernel_error(self) -> float:
        """Of the replay against the traced kernels, likewise."""
        return self.replay_s / self.busy_s - 1


def programs_in(folder: Path, record: Record, hardware: HardwareModel) -> list[Ran]:
    """All that `trace` has left in a folder, at the speeds of the hardware.

    Args:
      record: has the same plans, measured without a trace.
    """
    measured = {(row.step, row.plan): row.step_s for row in record.rows if row.rounds_s}
    found: list[Ran] = []
    for path in sorted(folder.glob("*.kernels.json")):
        name = path.name.removesuffix(".kernels.json")
        traced = json.loads(path.read_text(encoding="utf-8"))
        module = gzip.decompress((folder / f"{name}.module.gz").read_bytes())
        schedule = read_schedule(read_module(module), [(axis, 1) for axis in AXES], [1] * len(AXES))
        played, _ = replay(schedule, axes=[MeshAxis(name=axis) for axis in AXES], hardware=hardware)
        kernels = InstructionPrices(schedule, hardware.fabric.chip, hardware.speeds)
        replayed = Counter[str]()
        multiplying = 0.0
        for one, times in executed(schedule.body):
            if isinstance(one, Compute):
                spent_s = times * sum(spent for _, spent in kernels.work(one).causes) / TICKS_PER_S
                replayed[_family(one.name)] += spent_s
                multiplying += spent_s * bool(one.flops)
        spent_by = Counter[str]()
        for kernel, (_, seconds) in traced["kernels"].items():
            spent_by[_family(kernel)] += seconds
        multiplying_s, _ = shares(traced["kernels"])
        found.append(
            Ran(
                step=name,
                plan=traced["plan"],
                measured_s=measured.get((name, traced["plan"]), 0.0),
                busy_s=traced["busy_s"],
                multiplying_s=multiplying_s,
                replay_s=played.step_s,
                replayed_multiplying_s=multiplying,
                kernels=tuple(
                    (name, seconds, replayed[name])
                    for name, seconds in spent_by.most_common()
                    if replayed[name]
                ),
                copied_s=sum(spent_by[name] for name in _CUDA_COPIES),
                replayed_copies_s=replayed["copy"]
                + max(replayed["fusion"] - spent_by["fusion"], 0.0),
            )
        )
    return found


def _family(name: str) -> str:
    """A kernel's name without the number at its end, written alike in traces and in schedules."""
    return re.sub(r"_\d+$", "", re.sub(r"[.-]", "_", name))


def lines_of(found: Sequence[Ran], speeds: str) -> list[str]:
    """What a reader sees of them, one line for each program."""
    lines = [f"programs that ran, replayed with the {speeds}:"] if found else []
    for one in found:
        rest_s = one.busy_s - one.multiplying_s
        replayed_s = one.replay_s - one.replayed_multiplying_s
        lines.append(
            f"  {one.step} {one.plan}: step {format_seconds(one.measured_s)}, replay "
            f"{one.error:+.1%}; kernels {format_seconds(one.busy_s)}, "
            f"{one.kernel_error:+.1%}; multiplications {format_seconds(one.multiplying_s)}, "
            f"{one.replayed_multiplying_s / one.multiplying_s - 1:+.1%}; the rest "
            f"{format_seconds(rest_s)}, {replayed_s / rest_s - 1:+.1%}"
        )
        parts = [("copies", one.copied_s, one.replayed_copies_s), *one.kernels[:_MOST]]
        named = [f"{name} {spent / played:.2f}" for name, spent, played in parts if played]
        lines.append(f"    traced / replayed: {', '.join(named)}")
    return lines
