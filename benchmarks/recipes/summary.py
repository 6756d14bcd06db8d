"""Predictions beside what was measured: errors, order within a group, and what does not fit."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from automesh.units import format_bytes, format_seconds
from benchmarks.recipes.predict import Prediction
from benchmarks.recipes.records import Record, Time

APART = 0.05
"""Measurements that are closer are not held to an order."""
AIMS = {"dense": 0.12, "mixture": 0.25}
"""Median errors that are aimed at; above them the causes of a record are told."""
_MOST = 4
_Key = TypeVar("_Key", str, tuple[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A record that was predicted.

    Attributes:
      time: that was measured; None for a run that did not fit, or whose time is not known.
    """

    record: Record
    time: Time | None
    prediction: Prediction

    @property
    def kind(self) -> str:
        return "mixture" if self.record.is_mixture else "dense"

    @property
    def error(self) -> float | None:
        """Of the predicted time, as a share of the measured one; None if either is missing."""
        found = self.prediction.found
        if self.time is None or found.kind != "predicted":
            return None
        return found.step_s / self.time.step_s - 1.0

    @property
    def slice(self) -> tuple[str, str]:
        """What records must share to be put in an order: group and devices."""
        return self.record.group, self.record.target


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures over all rows."""
    exact = [row for row in rows if row.record.is_exact]
    parts = {
        "all": exact,
        **_parted(exact, lambda row: row.kind),
        **_parted(exact, lambda row: f"{row.kind} {row.record.precision}"),
        **_parted(exact, lambda row: row.record.generation),
        **_parted(exact, lambda row: row.record.group),
    }
    return {
        "records": len(rows),
        "exact": len(exact),
        "compiles": len({row.prediction.digest for row in rows}),
        "generations": sorted({row.record.generation for row in exact if row.error is not None}),
        "errors": {name: found for name, part in parts.items() if (found := errors(part))},
        "order": order(exact),
        "memory": memory(exact),
        "not_exact": errors([row for row in rows if not row.record.is_exact]),
        "failed": {
            row.record.id: row.prediction.found.reason
            for row in rows
            if row.prediction.found.kind == "failed"
        },
    }


def _parted(rows: Iterable[Row], key: Callable[[Row], _Key]) -> dict[_Key, list[Row]]:
    parts: dict[_Key, list[Row]] = defaultdict(list)
    for row in rows:
        parts[key(row)].append(row)
    return dict(sorted(parts.items()))


def errors(rows: Iterable[Row]) -> dict[str, Any]:
    """Median of the absolute errors, of the errors themselves, and the worst; empty without any."""
    found = [error for row in rows if (error := row.error) is not None]
    if not found:
        return {}
    return {
        "records": len(found),
        "median": round(statistics.median(map(abs, found)), 4),
        "bias": round(statistics.median(found), 4),
        "worst": round(max(found, key=abs), 4),
    }


def order(rows: Sequence[Row]) -> dict[str, Any]:
    """Pairs on one slice that were asked for differently and are apart, and groups of meshes.

    Times are taken for a token: records of one group may differ in their batch.
    """
    pairs = right = groups = found = 0
    missed: list[str] = []
    for (group, _), part in _parted(rows, lambda row: row.slice).items():
        timed = [row for row in part if row.error is not None]
        for one, other in itertools.combinations(timed, 2):
            if one.prediction.digest == other.prediction.digest:
                continue
            fast, slow = sorted((one, other), key=_measured_s)
            if _measured_s(slow) <= (1.0 + APART) * _measured_s(fast):
                continue
            pairs += 1
            if _predicted_s(fast) < _predicted_s(slow):
                right += 1
            else:
                missed.append(f"{fast.record.id} before {slow.record.id}")
        if len({row.record.mesh.text for row in timed}) > 1:
            groups += 1
            found += min(timed, key=_measured_s) is min(timed, key=_predicted_s)
            if found < groups:
                missed.append(f"the fastest of {group}")
    return {
        "pairs": pairs,
        "pairs_right": right,
        "groups_of_meshes": groups,
        "fastest_found": found,
        "missed": missed,
    }


def _measured_s(row: Row) -> float:
    assert row.time is not None
    return row.time.step_s / row.record.tokens_per_step


def _predicted_s(row: Row) -> float:
    return row.prediction.found.step_s / row.record.tokens_per_step


def memory(rows: Iterable[Row]) -> dict[str, int]:
    """Of runs that fit and of those that did not, how many are said not to fit."""
    judged = [row for row in rows if row.prediction.found.kind != "failed"]
    said = [
        (row.record.outcome != "", row.prediction.found.kind == "does not fit") for row in judged
    ]
    return {
        "ran": sum(not oom for oom, _ in said),
        "ran_said_not_to_fit": sum(is_said and not oom for oom, is_said in said),
        "did_not_fit": sum(oom for oom, _ in said),
        "did_not_fit_said": sum(is_said and oom for oom, is_said in said),
    }


def described(row: Row) -> list[str]:
    """The lines of one record; what may be the cause of a miss below."""
    record, found, mesh = row.record, row.prediction.found, row.prediction.asked.mesh
    measured = f"{format_seconds(row.time.step_s)} {row.time.basis}" if row.time else record.outcome
    head = f"{record.id} {record.model} {record.precision} on {record.target}, {mesh}"
    if found.kind == "predicted":
        error = f" ({row.error:+.1%})" if row.error is not None else ""
        line = f"  {measured or 'no time'}, predicted {format_seconds(found.step_s)}{error}"
        line += f", {format_bytes(found.peak_bytes)} of {format_bytes(found.limit_bytes)}"
    elif found.kind == "does not fit":
        sizes = f"{format_bytes(found.peak_bytes)} of {format_bytes(found.limit_bytes)}"
        line = f"  {measured}, predicted not to fit: {sizes}"
    else:
        line = f"  {measured}, not predicted: {found.reason}"
    return [head, line, *(f"    {cause}" for cause in causes(row))]


def causes(row: Row) -> list[str]:
    """What a miss may come from, in words; empty where the aim is reached."""
    error, found = row.error, row.prediction.found
    is_wrong_about_fit = (found.kind == "does not fit") != (row.record.outcome != "")
    if found.kind == "failed" or (error is None and not is_wrong_about_fit):
        return []
    if error is not None and abs(error) <= AIMS[row.kind]:
        return []
    parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in found.causes[:_MOST])
    said = [f"of the predicted time: {parts}"] if parts else []
    said += [f"without a price: {one}" for one in found.uncounted[:_MOST]]
    said += list(row.prediction.asked.remarks)
    refused = [one for one in row.prediction.asked.left_out if "refused" in one]
    if refused:
        names = ", ".join(one.partition("=")[0] for one in refused)
        said.append(f"{len(refused)} options that the compiler refuses: {names}")
    return said


def beside(rows: Sequence[Row], published: Mapping[str, Prediction]) -> list[str]:
    """The table of the published mesh beside the best that a search finds.

    Args:
      rows: of searches.
      published: what became of the records' own meshes, by id.
    """
    lines = [
        f"{'record':<20}{'published mesh':<28}{'replayed':>10}  {'best found':<36}{'replayed':>10}"
        f"{'ratio':>8}"
    ]
    for row in rows:
        own, best = published.get(row.record.id), row.prediction.found
        if own is None or best.kind != "predicted":
            continue
        time = format_seconds(own.found.step_s) if own.found.step_s else own.found.kind
        ratio = f"{best.step_s / own.found.step_s:>8.3f}" if own.found.step_s else ""
        lines.append(
            f"{row.record.id:<20}{own.asked.mesh:<28}{time:>10}  {best.mesh:<36}"
            f"{format_seconds(best.step_s):>10}{ratio}"
        )
    return lines if len(lines) > 1 else []


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """The records that are not predicted, by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one, reason in reasons.items():
        by_reason[reason].append(one)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [f"  {reason}: {', '.join(names)}" for reason, names in ranked]
