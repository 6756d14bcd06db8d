"""Measured plans beside what is predicted of them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from automesh.cost.roofline import predict
from automesh.hardware.chips import chip_for
from automesh.hardware.compilers import compiler_for
from automesh.outcomes import Compiled, OutOfMemory
from automesh.units import format_bytes, format_percent, format_seconds
from benchmarks.attached.record import Record, Row
from benchmarks.support.compiles import Case, bench

_APART = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured plan beside what was predicted of it; 0 where nothing was.

    Attributes:
      sheet_s, profile_s: estimates by the data sheet, and by the calibration.
      counts_s: by the counts of the program that ran.
      replay_s: of the program that a compiler without the device schedules.
      estimated_bytes, replayed_bytes: memory by the estimate, and by that compiler.
    """

    row: Row
    sheet_s: float = 0.0
    profile_s: float = 0.0
    counts_s: float = 0.0
    replay_s: float = 0.0
    estimated_bytes: int = 0
    replayed_bytes: int = 0


def compare(record: Record, folder: Path, profiles: Path, *, workers: int) -> list[Compared]:
    """Predicts every measured plan in four ways."""
    chip = chip_for(record.device_kind, record.platform)
    found: list[Compared] = []
    for step in record.steps:
        rows = [row for row in record.rows if row.step == step.name and row.rounds_s]
        if not rows:
            continue
        case = Case(
            name=f"attached-{step.name}",
            script=step.script,
            argv=step.arguments,
            target=record.selector,
            space=step.space,
        )
        with bench(case, folder, list, profiles) as sheet:
            by_sheet = {str(plan): one for plan, one in sheet.estimates.items()}
            played: dict[str, Any] = {}
            memories: dict[str, int] = {}
            if compiler_for("gpu").version:
                sheet.compile(sheet.plans, workers=workers)
                played = {str(one.plan): one.replay for one in sheet.played(sheet.plans)}
                for plan in sheet.plans:
                    outcome = sheet.outcome(plan)
                    if isinstance(outcome, Compiled):
                        memories[str(plan)] = outcome.memory.peak_bytes
                    elif isinstance(outcome, OutOfMemory):
                        memories[str(plan)] = outcome.needed_bytes
            by_profile = {str(plan): one for plan, one in sheet.calibrated.items()}
        for row in rows:
            replayed = played.get(row.plan)
            found.append(
                Compared(
                    row=row,
                    sheet_s=by_sheet[row.plan].step_s,
                    profile_s=by_profile[row.plan].step_s,
                    counts_s=predict(row.counts, chip).step_s if row.counts else 0.0,
                    replay_s=replayed.step_s if replayed is not None else 0.0,
                    estimated_bytes=by_sheet[row.plan].memory_bytes,
                    replayed_bytes=memories.get(row.plan, 0),
                )
            )
    return found


_TIMES = {"sheet": "sheet_s", "profile": "profile_s", "counts": "counts_s", "replay": "replay_s"}


def figures(found: Sequence[Compared]) -> dict[str, Any]:
    """Errors over the plans that have both sides: of times with their sign, of memory, of order."""
    visits = [
        abs(rounds[1] / rounds[0] - 1) for one in found if len(rounds := one.row.rounds_s) > 1
    ]
    summary: dict[str, Any] = {
        "plans": len(found),
        "visited_twice": len(visits),
        "visits_apart": round(max(visits, default=0.0), 4),
    }
    for name, field in _TIMES.items():
        pairs = [(one, getattr(one, field)) for one in found if getattr(one, field) > 0]
        if pairs:
            summary[name] = errors_of([said / one.row.step_s - 1 for one, said in pairs])
            summary[name] |= order_of([(one.row.step, one.row.step_s, said) for one, said in pairs])
    memory = {
        "estimated_memory": [(one.estimated_bytes, one.row) for one in found],
        "attached_memory": [(one.row.stated_bytes, one.row) for one in found],
        "replayed_memory": [(one.replayed_bytes, one.row) for one in found],
    }
    for name, said in memory.items():
        shares = [size / row.peak_bytes - 1 for size, row in said if size and row.peak_bytes]
        if shares:
            summary[name] = errors_of(shares)
    return summary


def errors_of(shares: Sequence[float]) -> dict[str, float]:
    """Median and worst of relative errors without their signs, and the median with them."""
    sizes = sorted(abs(share) for share in shares)
    return {
        "plans": len(shares),
        "median": round(statistics.median(sizes), 4),
        "worst": round(sizes[-1], 4),
        "bias": round(statistics.median(shares), 4),
    }


def order_of(plans: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """How the plans of a step are ordered, which is what a search needs.

    Args:
      plans: of each the step, what it took, and what was predicted, in seconds.

    Returns:
      Kendall's tau of each step; of the pairs of plans of a step that are more than 5 % apart,
      how many are in the right order, and how many there are.
    """
    taus: dict[str, float] = {}
    right = total = 0
    for step in dict.fromkeys(step for step, _, _ in plans):
        mine = [(took_s, said) for name, took_s, said in plans if name == step]
        if len(mine) > 2:
            tau: Any = stats.kendalltau(*zip(*mine))
            taus[step] = round(float(tau.statistic), 3)
        for (one_s, one), (other_s, other) in itertools.combinations(mine, 2):
            if max(one_s, other_s) > (1 + _APART) * min(one_s, other_s):
                total += 1
                right += (one < other) == (one_s < other_s)
    return {"tau": taus, "pairs": [right, total]}


def table(found: Sequence[Compared]) -> list[str]:
    """One line for each plan, errors of the predictions with their sign."""
    lines = [
        f"{'plan':54} {'measured':>9} {'sheet':>7} {'profile':>7} {'counts':>7} {'replay':>7}"
        f" {'memory':>9} {'estim.':>7} {'here':>7} {'absent':>7}"
    ]
    for one in found:
        row = one.row
        times = [_off(getattr(one, field), row.step_s) for field in _TIMES.values()]
        sizes = [
            _off(size, row.peak_bytes)
            for size in (one.estimated_bytes, row.stated_bytes, one.replayed_bytes)
        ]
        peak = format_bytes(row.peak_bytes) if row.peak_bytes else "-"
        lines.append(
            f"{row.step + ' ' + row.plan:54} {format_seconds(row.step_s):>9} "
            + " ".join(f"{text:>7}" for text in times)
            + f" {peak:>9} "
            + " ".join(f"{text:>7}" for text in sizes)
        )
    return lines


def _off(said: float, true: float) -> str:
    if not said or not true:
        return "-"
    return f"{'+' if said >= true else '-'}{format_percent(abs(said / true - 1))}"
