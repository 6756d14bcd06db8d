"""The data of a study besides its trials: its header, the reference, the decision."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from automesh.errors import UsageError
from automesh.jsonio import to_json
from automesh.mesh.axes import Plan
from automesh.reading import check_regular
from automesh.report.estimates import Estimates
from automesh.report.facts import Devices, Provenance, Searched, StudyFacts, Versions
from automesh.report.result import Footer
from automesh.skipped import name_of_note
from automesh.texts.storage_url import masked, masked_url
from automesh.tuner.command.template import masked_template
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.measure.decision import Decision
from automesh.tuner.paths import as_seen, newest_study
from automesh.tuner.preparation import Aim, LegalPlans
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import notices_of
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.stored.notes import SCHEMA, upgraded_decision, upgraded_header
from automesh.tuner.study.study import Study, Trial, open_study
from automesh.units import format_wait

NO_ESTIMATES = Estimates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The facts of a search when it started; `show` needs only these and the trials.

    Attributes:
      facts: what is searched, for which devices, by what.
      baseline: the script's own plan, or nothing.
      enumerated: how many plans there are, the illegal ones included.
      plans: how many are legal, the baseline included.
      ruled_out: how many plans each rule rejected.
      estimated: how many of `plans` have an estimate.
      refused: how many of them have none because the step refuses them.
      outside: plans, as text, that the study knows from other search spaces and that are not legal
        in this one.
    """

    facts: StudyFacts
    baseline: tuple[Plan, ...]
    enumerated: int
    plans: int
    ruled_out: tuple[tuple[str, int], ...]
    estimated: int = 0
    refused: int = 0
    outside: tuple[str, ...] = ()

    @property
    def device_memory(self) -> DeviceMemory:
        """Returns what a plan may use of a device's memory."""
        devices = self.facts.devices
        return DeviceMemory(limit_bytes=devices.memory_bytes, reserve_bytes=devices.reserve_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """The typed notes of one study; those of an older script or other versions are not read.

    Attributes:
      outside: plans, as text, that results leave out, in addition to those outside of the study's
        scope.
    """

    study: Study
    source_hash: str
    versions: Versions
    outside: frozenset[str] = frozenset()

    def is_current(self, trial: Trial) -> bool:
        """Whether a trial counts: it is of this script, these versions and a plan that is searched.

        A trial that failed for lack of time or memory counts only if there is no more of it now.
        """
        mine = trial.matches(self.source_hash, self.versions) and self.tells_of(trial.plan)
        return mine and not self.study.scope.overcomes(trial.outcome)

    def tells_of(self, plan: Plan) -> bool:
        """Whether a plan belongs to the search space as it is now."""
        return self.study.scope.covers(plan) and str(plan) not in self.outside

    def note_header(self, header: Header) -> None:
        self.study.note("header", {"schema": SCHEMA, **to_json(header, Header)})

    def note_footer(self, footer: Footer) -> None:
        self.note("footer", to_json(footer, Footer))

    def footer(self) -> Footer | None:
        return self.read("footer", Footer)

    def note_reference(self, name: str) -> None:
        self.note("reference", name)

    def reference(self) -> str:
        return self.read("reference", str) or ""

    def note_decision(self, decision: Decision) -> None:
        self.note("decision", {"schema": SCHEMA, **to_json(decision, Decision)})

    def decision(self) -> Decision | None:
        """Reads the decision; None if there is none, or if its plan is not searched any more."""
        found = upgraded_decision(self.noted("decision"))
        decision: Decision | None = self.study.read_note("decision", found, Decision)
        if decision is None or not self.tells_of(decision.winner):
            return None
        return replace(
            decision,
            comparisons=tuple(pair for pair in decision.comparisons if self.tells_of(pair[0])),
            confirmed=tuple(pair for pair in decision.confirmed if self.tells_of(pair[0])),
        )

    def note(self, key: str, value: Any) -> None:
        """Stores a JSON value for the script and the versions as they are now."""
        mine = {"source_hash": self.source_hash, "versions": dict(self.versions), "value": value}
        self.study.note(self._name(key), mine)

    def _name(self, key: str) -> str:
        # One for each script: a change that is taken back finds what was decided before it.
        return f"{key}.{self.source_hash}"

    def noted(self, key: str) -> Any:
        """Returns the value that `note` has stored under a key; None if there is none."""
        found = self.study.noted(self._name(key))
        if found is None:
            return None
        if not isinstance(found, dict):
            self.study.skipped.note(name_of_note(key), UsageError("it is no JSON object"))
            return None
        mine = (self.source_hash, dict(self.versions))
        said = (found.get("source_hash"), found.get("versions"))
        return found.get("value") if said == mine else None

    def read(self, key: str, kind: Any) -> Any:
        """Reads what `note` has stored, as a value of `kind`; None if it is missing or damaged."""
        return self.study.read_note(key, self.noted(key), kind)


def notebook_of(study: Study, header: Header) -> Notebook:
    """Returns the notes of a study for the script and the versions of a header."""
    provenance = header.facts.provenance
    return Notebook(
        study=study,
        source_hash=provenance.source_hash,
        versions=provenance.versions,
        outside=frozenset(header.outside),
    )


def read_header(study: Study) -> Header | None:
    """Reads the header that the last search left; None if there is none, or it is damaged."""
    found = upgraded_header(study.noted("header"))
    header = study.read_note("header", found, Header)
    return None if header is None else _without_secrets(header)


def _without_secrets(header: Header) -> Header:
    """Masks passwords in a header; former versions have masked only simple ones."""
    facts = header.facts
    provenance = replace(facts.provenance, location=masked_url(facts.provenance.location))
    searched = replace(facts.searched, template=masked_template(facts.searched.template))
    notices = tuple(masked(notice) for notice in facts.notices)
    facts = replace(facts, searched=searched, provenance=provenance, notices=notices)
    return replace(header, facts=facts)


# What a search notes at its start, and how it says that its time is over.


class Prepared(Protocol):
    """A prepared step or a prepared command, from which the facts of a study are made."""

    @property
    def searched(self) -> Searched: ...
    @property
    def aim(self) -> Aim: ...
    @property
    def selector(self) -> str: ...
    @property
    def device_memory(self) -> DeviceMemory: ...
    @property
    def folder(self) -> Path: ...
    @property
    def source_hash(self) -> str: ...
    @property
    def provenance(self) -> Versions: ...


def facts_of(
    request: SearchRequest,
    prepared: Prepared,
    legal: LegalPlans,
    study: Study | None,
    *,
    estimates: Estimates = NO_ESTIMATES,
    is_ahead: bool = False,
) -> StudyFacts:
    """Makes the facts of a study, which are known before anything is compiled or run.

    Args:
      study: None for a dry run that leaves none.
      estimates: nothing for a command, which has none.
      is_ahead: the devices are not here.
    """
    aim, memory = prepared.aim, prepared.device_memory
    return StudyFacts(
        searched=replace(prepared.searched, data_by_mesh=estimates.data_by_mesh),
        devices=Devices(
            target=prepared.selector,
            platform=aim.platform,
            kind=aim.device_kind,
            count=aim.num_devices,
            are_absent=is_ahead,
            fabric=estimates.fabric,
            memory_bytes=memory.limit_bytes,
            reserve_bytes=memory.reserve_bytes,
        ),
        provenance=Provenance(
            source_hash=prepared.source_hash,
            versions=prepared.provenance,
            speeds=estimates.origin,
            again=request.again and request.again.without("dry-run"),
            location=shown_location(study) if study else "",
            results_dir=as_seen(prepared.folder) if study else "",
        ),
        notices=notices_of(legal, estimates),
        details=estimates.details,
    )


def header_of(
    request: SearchRequest,
    prepared: Prepared,
    legal: LegalPlans,
    study: Study | None,
    *,
    estimates: Estimates = NO_ESTIMATES,
    is_ahead: bool = False,
) -> Header:
    """Makes the header of a study: its facts, and how many plans there are. The arguments are as
    for `facts_of`.

    Arguments as of `facts_of`.
    """
    enumeration, plans = legal.enumeration, legal.plans
    extra = len(plans) - len(enumeration.legal)  # a baseline outside of the space
    return Header(
        facts=facts_of(request, prepared, legal, study, estimates=estimates, is_ahead=is_ahead),
        baseline=legal.baseline,
        enumerated=enumeration.num_plans + extra,
        plans=len(plans),
        ruled_out=tuple((rejection.rule, rejection.count) for rejection in enumeration.rejections),
        estimated=len(estimates.found),
        refused=estimates.refusals,
        outside=_outside(prepared, plans, study, is_ahead=is_ahead) if study else (),
    )


def _outside(
    prepared: Prepared, plans: Collection[Plan], study: Study, *, is_ahead: bool
) -> tuple[str, ...]:
    """Lists plans that were searched here before for this script, and are not legal now."""
    mine = (prepared.source_hash, prepared.provenance)
    legal = frozenset(plans)
    rungs = [study.compile, study.measure, *([study.screen] if is_ahead else [])]
    known = dict.fromkeys(
        trial.plan for rung in rungs for trial in rung.trials() if trial.matches(*mine)
    )
    return tuple(str(plan) for plan in known if plan not in legal)


def shown_location(study: Study) -> str:
    """Says where the trials of a study are."""
    storage = study.storage
    return storage.text if storage.kind == "server" else as_seen(storage.location)


def spent(budget_s: float) -> str:
    """Returns words such as `the budget of 10 min was spent`."""
    text = format_wait(budget_s) if budget_s >= 120 else f"{budget_s:.0f} s"
    return f"the budget of {text} was spent"


# Opening a study that is there, to read it.


def _holds_something(path: Path) -> bool:
    """Whether a file exists and is not empty; opening an empty one would make a storage of it."""
    check_regular(path)
    return path.is_file() and path.stat().st_size > 0


@contextmanager
def reading(
    study: Path | None, *, results: Path, storage: str, in_place: bool = True
) -> Generator[tuple[Path, Study, Header]]:
    """Opens a study; yields its folder, the study, and its header.

    Args:
      study: its folder; None for the one that changed last under `results`.
      in_place: as for `open_backend`.

    Raises:
      UsageError: there is no such study, or it cannot be read.
    """
    folder = newest_study(results, storage) if study is None else study
    place = parse_storage(storage, folder)
    if place.kind != "server" and not _holds_something(Path(place.location)):
        raise UsageError(
            f"there is no study in `{folder}`",
            hint="give the folder of a study, as `search` printed it, or its --storage",
        )
    with open_study(place, folder.resolve().name, create=False, in_place=in_place) as opened:
        yield folder, opened, header_in(opened, folder)


def header_in(study: Study, folder: Path) -> Header:
    """Reads the header of an open study.

    Raises:
      UsageError: there is none, or it is damaged.
    """
    header = read_header(study)
    named = study.skipped.named
    damage = named.get(name_of_note("header")) or next(iter(named), "")
    if header is None and damage:
        raise UsageError(
            f"the header of the study in `{folder}` is damaged: {damage}",
            hint="run its search again: its trials are kept, and the header is written anew",
        )
    if header is None:
        raise UsageError(f"the study in `{folder}` holds nothing yet", hint="run its search first")
    return header
