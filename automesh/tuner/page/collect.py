"""Collects the data of a study's page: the result, and data from the study's folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from automesh.cost.terms import value_of
from automesh.errors import AutomeshError, UsageError
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import MAPPING, Plan
from automesh.report import words
from automesh.report.estimates import ESTIMATES
from automesh.report.explain.nouns import Explained, Explanation
from automesh.report.explain.words import verdict_sentence
from automesh.report.files.csv import plan_cells, write_text
from automesh.report.html.document import document_of
from automesh.report.html.nouns import (
    EstimatedPlan,
    MeasuredRound,
    MemoryPoint,
    Section,
    StudyPage,
)
from automesh.report.html.page import page_text
from automesh.report.result import Candidate, SearchResult
from automesh.skipped import Skipped
from automesh.texts.terminal import clean
from automesh.tuner.estimate.terms_cache import TERMS, StoredPropagation, TermsCache
from automesh.tuner.explain.mesh import (
    DamagedTerms,
    Ground,
    explained,
    propagation_for,
    stored_terms,
)
from automesh.tuner.explain.study import estimate_rows, hardware_for, known_plans
from automesh.tuner.measure.decision import Records
from automesh.tuner.page.drawings import placed, timelines_of, wiring_of
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.metadata import Header, notebook_of, reading
from automesh.tuner.study.study import Study

REPORT = "report.html"  # in the folder of a study
MOST_EXPLAINED = 8
"""Number of plans that are broken down, compared in pairs and placed on the devices, besides the
baseline."""
MOST_POINTS = 40
"""Number of points in the program for which the page shows the live arrays; the largest ones."""


def write_report(study: Path | None, out: Path | None, *, results: Path, storage: str) -> Path:
    """Writes the page of a study.

    Args:
      study: folder of the study; None for the one under `results` that changed last.
      out: the file to write; None for `report.html` in the study's folder.

    Returns:
      The path of the page.

    Raises:
      UsageError: there is no such study, it cannot be read, or the file cannot be written.
    """
    with reading(study, results=results, storage=storage) as (folder, opened, header):
        page = page_of(folder, opened, header)
    path = out if out is not None else folder / REPORT
    write_text(
        page_text(document_of(page)), path, hint="name a file in a folder that you may write to"
    )
    return path


def page_of(folder: Path, study: Study, header: Header) -> StudyPage:
    """Returns the content of the page of an open study."""
    result = assemble(study, header)
    left_out: dict[Section, str] = {}
    rounds = tuple(_rounds(study, header))
    if not rounds:
        left_out["rounds"] = (
            "these devices are not here, so nothing was raced"
            if header.facts.devices.are_absent
            else "no race was run yet"
        )
    estimated = tuple(_estimated(result, folder / ESTIMATES))
    broken_down = _broken_down(folder, header, result, left_out)
    hardware = broken_down.hardware
    timelines = timelines_of(result, hardware, left_out)
    placements = placed(broken_down.plans, header.facts.devices.fabric, hardware, left_out)
    return StudyPage(
        result=result,
        estimated=estimated,
        explained=broken_down.sides,
        verdicts=tuple(_verdicts(result, broken_down.sides)),
        points=broken_down.points,
        rounds=rounds,
        timelines=timelines,
        wiring=wiring_of(header.facts.devices.fabric)
        if header.facts.devices.fabric is not None
        else None,
        placements=placements,
        left_out=left_out,
    )


def _rounds(study: Study, header: Header) -> Iterator[MeasuredRound]:
    """Yields all races, then all fresh processes, in the order of time."""
    records: Records = notebook_of(study, header).read("records", Records) or Records()
    number = 0
    for place, race in enumerate(records.races, start=1):
        length = max((len(seconds) for _, seconds in race.rounds), default=0)
        for plan, seconds in race.rounds:
            for here, step_s in enumerate(seconds, start=1):
                yield MeasuredRound(
                    number=number + here, where=f"race {place}", plan=str(plan), step_s=step_s
                )
        number += length
    for place, process in enumerate(records.processes, start=1):
        for plan, step_s in process.seconds:
            yield MeasuredRound(
                number=number + place, where="fresh processes", plan=str(plan), step_s=step_s
            )


def _estimated(result: SearchResult, table: Path) -> Iterator[EstimatedPlan]:
    """Yields the rows of `estimates.csv` whose plans have no trial."""
    known = {_key(plan_cells(one.plan).items()) for one in result.candidates}
    for _, row in estimate_rows(table, Skipped()):
        if _key(row.items()) in known:
            continue
        found = _plan_of_row(row)
        if found is not None:
            yield found


def _key(cells: Iterable[tuple[str, object]]) -> frozenset[tuple[str, str]]:
    """Returns the key of a plan: the texts of its columns in a table."""
    return frozenset(
        (name, str(value))
        for name, value in cells
        if value not in (None, "") and (name == "mesh" or name.startswith(_SETTINGS))
    )


_SETTINGS = (MAPPING, "knob.", "option.")


def _plan_of_row(row: dict[str, str]) -> EstimatedPlan | None:
    """Returns the plan of a row; None if a figure of the row is malformed."""
    settings = tuple(
        (name.partition(".")[2] if not name.startswith(MAPPING) else name, text)
        for name, text in row.items()
        if name.startswith(_SETTINGS) and text
    )
    try:
        causes = [
            (name.removeprefix("cause."), float(text))
            for name, text in row.items()
            if name.startswith("cause.") and text
        ]
        return EstimatedPlan(
            mesh=clean(row["mesh"]),
            settings=settings,
            step_s=float(row.get("estimated_s") or 0.0),
            bracket_s=(float(row.get("low_s") or 0.0), float(row.get("high_s") or 0.0)),
            memory_bytes=int(float(row.get("memory_bytes") or 0)),
            causes=tuple(sorted(causes, key=lambda one: -one[1])),
            reason=row.get("not_estimated", ""),
        )
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BrokenDown:
    """The plans that are explained in detail, and their data.

    Attributes:
      hardware: the devices, with the layouts of `plans`; None if unknown.
    """

    plans: tuple[Plan, ...]
    hardware: HardwareModel | None
    sides: tuple[Explained, ...] = ()
    points: tuple[tuple[MemoryPoint, ...], ...] = field(default=())


def _broken_down(
    folder: Path, header: Header, result: SearchResult, left_out: dict[Section, str]
) -> _BrokenDown:
    kept: Sequence[StoredPropagation] = ()
    if not header.facts.searched.template:
        cache = TermsCache(
            folder=folder / TERMS,
            source_hash=header.facts.provenance.source_hash,
            versions=header.facts.provenance.versions,
        )
        kept = cache.all()
    plans = _detailed_plans(folder, header, result, kept)
    if header.facts.devices.fabric is None or not plans:
        left_out["explained"] = "the study does not say how its devices are linked"
        return _BrokenDown(plans=plans, hardware=None)
    try:
        hardware = hardware_for(
            header.facts.devices.fabric,
            plans,
            platform=header.facts.devices.platform,
            device_kind=header.facts.devices.kind,
        )
    except AutomeshError as error:
        left_out["explained"] = str(error)
        return _BrokenDown(plans=plans, hardware=None)
    if not kept:
        left_out["explained"] = (
            "a command was run and timed, its programs were not seen"
            if header.facts.searched.template
            else "the study keeps no terms: nothing was estimated, or automesh has changed since"
        )
        return _BrokenDown(plans=plans, hardware=hardware)
    ground = Ground(kept=kept, hardware=hardware, command="")
    candidates = {one.plan: one for one in result.candidates}
    sides: list[Explained] = []
    points: list[tuple[MemoryPoint, ...]] = []
    why = "none of the best plans was estimated before time was up"
    for plan in plans:
        try:
            with stored_terms(folder):
                side = explained(plan, ground, candidates.get(plan))
                largest = tuple(_points(plan, kept))
        except DamagedTerms as error:
            why = str(error)
            continue
        except UsageError:  # It has no estimate; the table says so.
            continue
        sides.append(side)
        points.append(largest)
    if not sides:
        left_out["explained"] = why
    return _BrokenDown(plans=plans, hardware=hardware, sides=tuple(sides), points=tuple(points))


def _detailed_plans(
    folder: Path, header: Header, result: SearchResult, kept: Sequence[StoredPropagation]
) -> tuple[Plan, ...]:
    """Returns the best plans and the script's own; if no plan was tried yet, the best estimates."""

    def is_shown(one: Candidate) -> bool:
        return words.is_ranked(one) and not words.is_duplicate(one)

    ranked = [one.plan for one in result.candidates if is_shown(one)]
    if not ranked and kept:
        ranked = list(known_plans((), folder / ESTIMATES, kept, header, Skipped()))
    own = [one.plan for one in result.candidates if one.is_baseline]
    return tuple(dict.fromkeys([*ranked[:MOST_EXPLAINED], *own]))


def _points(plan: Plan, kept: Sequence[StoredPropagation]) -> Iterator[MemoryPoint]:
    """Yields the points of the program where temporaries on one device may be largest, in program
    order."""
    found = propagation_for(plan, kept)
    if found is None or found.pipeline is not None:
        return
    listed = [
        MemoryPoint(source=point.source, bytes=round(value_of(point.bytes, plan.sizes)))
        for point in found.terms.points
    ]
    least = sorted((one.bytes for one in listed), reverse=True)[:MOST_POINTS]
    yield from (one for one in listed if least and one.bytes >= least[-1])


def _verdicts(
    result: SearchResult, sides: Sequence[Explained]
) -> Iterator[tuple[tuple[int, int], str]]:
    for first, second in combinations(range(len(sides)), 2):
        pair = Explanation(
            workload=result.facts.searched.workload,
            target=result.facts.devices.target,
            device=result.facts.devices.kind,
            device_count=result.facts.devices.count,
            speeds=result.facts.provenance.speeds,
            one=sides[first],
            against=sides[second],
        )
        yield (first, second), verdict_sentence(pair)
