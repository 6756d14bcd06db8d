"""Explains plans of a study, or of a script without a study."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from automesh import limits
from automesh.cost.replay.trace import trace_json
from automesh.errors import AutomeshError, UsageError
from automesh.hardware import clusters_in, parse_target
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.model import HardwareModel, hardware_model
from automesh.hlo.store import default_store
from automesh.launch.cluster import workers_of
from automesh.mesh.axes import MAPPING, Call, Plan, parse_mesh
from automesh.mesh.mapping import parse_axes
from automesh.outcomes import Compiled, Failed, Failure
from automesh.reading import Unreadable, read_text
from automesh.report.estimates import ESTIMATES
from automesh.report.explain.nouns import Explanation
from automesh.report.files.csv import write_text
from automesh.report.progress import Progress
from automesh.report.result import Candidate, SearchResult
from automesh.skipped import Skipped
from automesh.space.options import value_of
from automesh.tuner.compile.replay import Player
from automesh.tuner.estimate.terms_cache import TERMS, StoredPropagation, TermsCache
from automesh.tuner.explain.mesh import Ground, explained, find_plan, stored_terms
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.capture import space_for
from automesh.tuner.session import open_session
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.identity import workload_name
from automesh.tuner.study.metadata import Header, reading
from automesh.tuner.workers import ask, layout_job, one_worker
from automesh.worker.messages import Surroundings
from automesh.worker.temporary import temporary_folder

_LAYOUT_LIMIT_S = 120.0


def explain_study(
    study: Path | None, mesh: str, against: str, *, results: Path, storage: str
) -> Explanation:
    """Explains a plan of a study from the study's data.

    Args:
      mesh: a mesh, optionally followed by knobs.
      against: another mesh to compare it with; empty for none.

    Raises:
      UsageError: there is no such study, or it lacks the plan or the data of its estimate.
    """
    with reading(study, results=results, storage=storage) as (folder, opened, header):
        result = assemble(opened, header)
        damage = opened.skipped.notices()
    if header.facts.searched.template:
        raise UsageError(
            f"the study in `{folder}` is of a command: its runs were timed, its programs not seen",
            hint="only a step that a `build` makes can be explained",
        )
    cache = TermsCache(
        folder=folder / TERMS,
        source_hash=header.facts.provenance.source_hash,
        versions=header.facts.provenance.versions,
    )
    kept = cache.all()
    if not kept and cache.skipped.named:
        raise UsageError(
            f"the study in `{folder}` keeps no terms: {cache.skipped.notices()[0]}",
            hint="run its search again, which makes them anew",
        )
    if header.facts.devices.fabric is None or not kept:
        raise UsageError(
            f"the study in `{folder}` keeps no terms: nothing in it was estimated, or the script "
            "or automesh has changed since",
            hint="run its search again: "
            f"{header.facts.provenance.command or 'automesh search SCRIPT'}",
        )
    plans = known_plans(result.candidates, folder / ESTIMATES, kept, header, cache.skipped)
    if not plans:
        said = "; ".join(cache.skipped.notices())
        raise UsageError(
            f"the study in `{folder}` names no plan{f': {said}' if said else ''}",
            hint="run its search again: it writes its table of estimates anew",
        )
    chosen, notices = _chosen(mesh, against, plans, header.facts.devices.count)
    ground = Ground(
        kept=kept,
        hardware=hardware_for(
            header.facts.devices.fabric,
            chosen,
            platform=header.facts.devices.platform,
            device_kind=header.facts.devices.kind,
        ),
        command=header.facts.provenance.command,
    )
    with stored_terms(folder):
        notices += _propagation_notes(chosen, kept) + damage + cache.skipped.notices()
    if (
        header.facts.provenance.speeds
        and header.facts.provenance.speeds != ground.hardware.speeds.origin
    ):
        notices += (f"its search estimated by other speeds: {header.facts.provenance.speeds}",)
    with stored_terms(folder):
        return _explanation(result, chosen, ground, notices)


def explain_script(
    request: SearchRequest, mesh: str, against: str, progress: Progress
) -> Explanation:
    """Explains a plan of a script; propagates its shardings first.

    Raises:
      UsageError: bad input, or no such plan.
      NoFeasibleMesh: no plan is legal.
    """
    target = parse_target(request.target, os.environ, clusters_in(request.hardware))
    # As in a dry run, nothing is measured.
    request, target, space = space_for(replace(request, dry_run=True), target, progress)
    chosen: Sequence[Plan] = ()
    notices: Sequence[str] = ()

    def choose(plans: Sequence[Plan]) -> Sequence[Plan]:
        nonlocal chosen, notices
        chosen, notices = _chosen(mesh, against, plans, plans[0].num_devices)
        return chosen

    with (
        temporary_folder("explain") as folder,
        workers_of(request, target, progress) as start_worker,
        open_session(request, target, space, progress, start_worker=start_worker) as session,
    ):
        preparation = session.preparation
        estimates = session.estimate(share=1.0, choose=choose, terms_folder=folder)
        kept = TermsCache(
            folder=folder,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
        ).all()
    for plan, reason in estimates.missing.items():
        raise UsageError(f"`{plan}` has no estimate: {reason}")
    fabric = estimates.fabric
    if fabric is None:
        raise UsageError(f"the devices of `{request.target}` do not say how they are wired")
    aim = preparation.aim
    ground = Ground(
        kept=kept,
        hardware=hardware_for(fabric, chosen, platform=aim.platform, device_kind=aim.device_kind),
        command="",
    )
    sides = [explained(plan, ground, None) for plan in chosen]
    return Explanation(
        workload=workload_name(request.entry),
        target=preparation.selector,
        device=aim.device_kind,
        device_count=aim.num_devices,
        speeds=ground.hardware.speeds.origin,
        one=sides[0],
        against=sides[1] if len(sides) > 1 else None,
        notices=tuple(dict.fromkeys([*notices, *estimates.notices, *estimates.details])),
    )


def _explanation(
    result: SearchResult, chosen: Sequence[Plan], ground: Ground, notices: Sequence[str]
) -> Explanation:
    candidates = {candidate.plan: candidate for candidate in result.candidates}
    sides = [explained(plan, ground, candidates.get(plan)) for plan in chosen]
    return Explanation(
        workload=result.facts.searched.workload,
        target=result.facts.devices.target,
        device=result.facts.devices.kind,
        device_count=result.facts.devices.count,
        speeds=ground.hardware.speeds.origin,
        one=sides[0],
        against=sides[1] if len(sides) > 1 else None,
        notices=tuple(notices),
        study=result.facts.provenance.location,
    )


def _chosen(
    mesh: str, against: str, plans: Sequence[Plan], num_devices: int
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Returns the plans that the user asks for, and notices about the choice."""
    found = [find_plan(mesh, plans, num_devices=num_devices)]
    if against.strip():
        first, _ = found[0]
        # Without knobs of its own it gets those of the first plan, so that only the mesh differs.
        alike = sorted(plans, key=lambda plan: plan.settings != first.settings)
        found.append(find_plan(against, alike, num_devices=num_devices))
    chosen = tuple(plan for plan, _ in found)
    if len(chosen) == 2 and chosen[0] == chosen[1]:
        raise UsageError(
            f"both are the plan `{chosen[0]}`: there is nothing to compare",
            hint="give another mesh, or knobs after the mesh, to --against",
        )
    return chosen, tuple(notice for _, notice in found if notice)


def known_plans(
    candidates: Iterable[Candidate],
    table: Path,
    kept: Sequence[StoredPropagation],
    header: Header,
    skipped: Skipped,
) -> tuple[Plan, ...]:
    """Returns all plans of a study, those with a trial first, then by their estimates.

    Args:
      skipped: collects damaged rows of the table.
    """
    plans = dict.fromkeys(candidate.plan for candidate in candidates)
    calls = {_as_text(call): call for call in map(_call_of, kept)}
    for number, row in estimate_rows(table, skipped):
        try:
            plans.setdefault(_plan_of(row, calls, header.facts.searched.axes))
        except (AutomeshError, KeyError) as error:
            skipped.note(f"row {number} of `{table.name}`", error)
    return tuple(plans)


def estimate_rows(table: Path, skipped: Skipped) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a table with the right number of cells, with their numbers from 1."""
    if not os.path.lexists(table):
        return
    try:
        text = read_text(table, limit_bytes=limits.ESTIMATES_BYTES)
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        head = next(rows, [])
        if "mesh" not in head:
            skipped.note(f"`{table.name}`", UsageError("it has no column `mesh`"))
            return
        for number, cells in enumerate(rows, start=1):
            if len(cells) == len(head):
                yield number, dict(zip(head, cells, strict=True))
            elif cells:
                error = UsageError(f"it has {len(cells)} cells, its head {len(head)}")
                skipped.note(f"row {number} of `{table.name}`", error)
    except (Unreadable, csv.Error) as error:
        skipped.note(f"`{table.name}`", error)


def _plan_of(
    row: Mapping[str, str], calls: Mapping[frozenset[tuple[str, str]], Call], axes: Sequence[str]
) -> Plan:
    """Returns the plan of one row of `estimates.csv`.

    Args:
      calls: from the text of a call in `estimates.csv` to the call that was propagated.
    """
    knobs = {key[5:]: text for key, text in row.items() if key.startswith("knob.") and text}
    logical = {
        key[len(MAPPING) :]: parse_axes(text)
        for key, text in row.items()
        if key.startswith(MAPPING) and text
    }
    # Without terms there is nothing to explain, so the type of a knob does not matter.
    said: Call = (tuple(logical.items()), tuple(knobs.items()))
    mapping, known = calls.get(_as_text(said), said)
    options = {
        key[7:]: value_of(text) for key, text in row.items() if key.startswith("option.") and text
    }
    return Plan(
        axes=parse_mesh(row["mesh"], axes),
        mapping=mapping,
        knobs=known,
        compiler_options=tuple(options.items()),
    )


def _call_of(kept: StoredPropagation) -> Call:
    return kept.job.mapping, kept.job.knobs


def _as_text(call: Call) -> frozenset[tuple[str, str]]:
    settings = Plan(axes=(), mapping=call[0], knobs=call[1]).settings
    return frozenset((name, str(value)) for name, value in settings)


def _propagation_notes(plans: Sequence[Plan], kept: Sequence[StoredPropagation]) -> tuple[str, ...]:
    calls = {plan.call for plan in plans}
    notes = [note for one in kept if _call_of(one) in calls for note in one.propagation.notes]
    return tuple(dict.fromkeys(notes))


def hardware_for(
    fabric: Fabric, plans: Sequence[Plan], *, platform: str, device_kind: str
) -> HardwareModel:
    """Returns the devices, with the layouts of the plans' axes on them."""
    return hardware_model(
        fabric,
        _layouts(fabric, plans, platform=platform, device_kind=device_kind),
        platform=platform,
        device_kind=device_kind,
        environ=os.environ,
    )


def _layouts(fabric: Fabric, plans: Sequence[Plan], *, platform: str, device_kind: str) -> Layouts:
    """Returns the layouts of the plans' axes on a torus; empty if there is no torus."""
    shapes = tuple(dict.fromkeys(tuple(axis.ici for axis in plan.axes) for plan in plans))
    if fabric.kind != "torus":
        return Layouts(shapes=shapes, spans=((),) * len(shapes))
    job = layout_job(fabric, platform=platform, device_kind=device_kind, shapes=shapes)
    with one_worker(Surroundings(platforms="cpu")) as pool:
        answer = ask(pool, job, Layouts, _LAYOUT_LIMIT_S)
    if isinstance(answer, Failure):
        raise UsageError(f"where the mesh lies on the devices could not be found out: {answer}")
    return answer


def write_trace(study: Path, mesh: str, path: Path, *, results: Path, storage: str) -> None:
    """Replays a compiled plan of a study, and writes the timeline to a file.

    Args:
      mesh: mesh of the plan, optionally followed by knobs.

    Raises:
      UsageError: no such study, nothing in it was compiled for absent devices, no such plan, its
        program is not in the store any more, or the file cannot be written.
    """
    with reading(study, results=results, storage=storage) as (folder, opened, header):
        result = assemble(opened, header)
    compiled = {
        candidate.plan: candidate.outcome
        for candidate in result.candidates
        if isinstance(candidate.outcome, Compiled) and candidate.outcome.replay is not None
    }
    if header.facts.devices.fabric is None or not compiled:
        raise UsageError(
            f"nothing in the study in `{folder}` was replayed, so there is no trace to write",
            hint="a search for devices that are not here replays what it compiles: `automesh "
            "search SCRIPT --target v5e:4x4`",
        )
    plan, _ = find_plan(mesh, list(compiled), num_devices=header.facts.devices.count)
    hardware = hardware_for(
        header.facts.devices.fabric,
        [plan],
        platform=header.facts.devices.platform,
        device_kind=header.facts.devices.kind,
    )
    played = Player(store=default_store(os.environ), hardware=hardware).play(plan, compiled[plan])
    if isinstance(played, Failed):
        raise UsageError(played.reason)
    replayed, timeline = played
    notes = [
        ("plan", str(plan)),
        ("target", header.facts.devices.target),
        ("speeds", hardware.speeds.origin),
    ]
    notes += [("not counted", what) for what in replayed.uncounted]
    text = trace_json(timeline, name=f"{plan} on {header.facts.devices.target}", notes=notes)
    write_text(text, path, hint="name a file in a folder that you may write to")
