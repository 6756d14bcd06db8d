"""What a study remembers besides its trials: its header, the reference, the decision."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.hardware.fabric.fabric import Fabric
from automesh.jsonio import to_json
from automesh.mesh.axes import Plan, usual_batch_axes
from automesh.program.infer.search.layout import NamedSplit
from automesh.reading import check_regular
from automesh.report.estimates import Estimates
from automesh.report.search_command import SearchCommand, read_text
from automesh.skipped import name_of_note
from automesh.texts.storage_url import masked, masked_url
from automesh.tuner.command.template import masked_template
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from automesh.tuner.measure.decision import Decision
from automesh.tuner.paths import as_seen, newest_study
from automesh.tuner.preparation import Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import notices_of
from automesh.tuner.study.identity import workload_name
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import Study, Trial, open_study
from automesh.units import format_wait

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a search knew when it started; with the trials it is all that `show` needs.

    Attributes:
      plans: how many plans are legal, the baseline included.
      ruled_out: how many plans each rule rejected.
      location: where the trials are, for people.
      speeds: where the speeds of the estimates come from, in words.
      estimated: how many of `plans` have an estimate.
      refused: how many of them have none because the step refuses them.
      fabric: how the devices are wired; None if that could not be told.
      is_ahead: True if the devices are not here: nothing can be measured.
      device_memory: what a plan may use of a device's memory.
      axis_types: what the step was searched with, a word for each axis; empty: nobody noted them.
      batch_axes: axes that the rows of a batch are split over; None: nobody noted them.
      again: the command that goes on with the search; None for a search from Python, and where a
        former version has kept none that can be read.
      outside: plans, as text, that the study knows from other search spaces and that are not legal
        in this one.
      split: the axes of a script's mesh that are several in the search, in the words of `--split`.
      template: of the command that is run for each plan; empty where a script's step is.
      details: how the estimates were made, for those who ask.
      made_up: arguments of the step that nobody gives values for, by name.
      arguments: of a step whose shardings are inferred, how logical axes split them.
    """

    workload: str
    target: str
    platform: str
    device_kind: str
    device_count: int
    axes: tuple[str, ...]
    enumerated: int
    plans: int
    ruled_out: tuple[tuple[str, int], ...]
    baseline: tuple[Plan, ...]
    notices: tuple[str, ...]
    tokens_per_step: int
    location: str
    results_dir: str
    source_hash: str
    versions: Pairs
    speeds: str = ""
    estimated: int = 0
    fabric: Fabric | None = None
    is_ahead: bool = False
    device_memory: DeviceMemory = NO_LIMIT
    outside: tuple[str, ...] = ()
    template: str = ""
    split: str = ""
    not_searched: str = ""
    axis_types: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] | None = None
    details: tuple[str, ...] = ()
    made_up: tuple[str, ...] = ()
    refused: int = 0
    again: SearchCommand | None = None
    arguments: tuple[NamedSplit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """How the last run ended; `certificate`, `belief` and `made` as in `SearchResult`."""

    stop_reason: str
    rules_path: str
    interrupted: bool
    certificate: str = ""
    belief: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """Typed notes of one study; those of an older script or other versions are not read.

    Attributes:
      outside: plans, as text, that are not told of, beside those out of the study's scope.
    """

    study: Study
    source_hash: str
    versions: Pairs
    outside: frozenset[str] = frozenset()

    def is_current(self, trial: Trial) -> bool:
        """Whether a trial counts: of the script and the versions as they are now, of a plan that is
        searched, and not for want of time or memory that there is now."""
        mine = trial.matches(self.source_hash, self.versions) and self.tells_of(trial.plan)
        return mine and not self.study.scope.overcomes(trial.outcome)

    def tells_of(self, plan: Plan) -> bool:
        """Whether a plan belongs to the search space as it is now."""
        return self.study.scope.covers(plan) and str(plan) not in self.outside

    def note_header(self, header: Header) -> None:
        self.study.note("header", to_json(header, Header))

    def note_footer(self, footer: Footer) -> None:
        self.note("footer", to_json(footer, Footer))

    def footer(self) -> Footer | None:
        return self.read("footer", Footer)

    def note_reference(self, name: str) -> None:
        self.note("reference", name)

    def reference(self) -> str:
        return self.read("reference", str) or ""

    def note_decision(self, decision: Decision) -> None:
        self.note("decision", to_json(decision, Decision))

    def decision(self) -> Decision | None:
        """What was decided; None if nothing was, or for a plan that is not searched any more."""
        found = _upgraded(self.noted("decision"))
        decision: Decision | None = self.study.read_note("decision", found, Decision)
        if decision is None or not self.tells_of(decision.winner):
            return None
        return replace(
            decision,
            comparisons=tuple(
                comparison for comparison in decision.comparisons if self.tells_of(comparison.plan)
            ),
            confirmed=tuple(pair for pair in decision.confirmed if self.tells_of(pair[0])),
        )

    def note(self, key: str, value: Any) -> None:
        """Keeps a JSON value for the script and the versions as they are now."""
        mine = {"source_hash": self.source_hash, "versions": dict(self.versions), "value": value}
        self.study.note(self._name(key), mine)

    def _name(self, key: str) -> str:
        # One for each script: a change that is taken back finds what was decided before it.
        return f"{key}.{self.source_hash}"

    def noted(self, key: str) -> Any:
        """What `note` has kept under a key; None if nothing."""
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
        """What `note` has kept under a key, as a value of `kind`; None if nothing, or damaged."""
        return self.study.read_note(key, self.noted(key), kind)


def _upgraded(found: Any) -> Any:
    """A decision of a version that compared with the winner of a race, as one of now.

    Its comparisons are left out: they were made with another plan than the exported one.
    """
    if not isinstance(found, dict) or "race" not in found:
        return found
    race, kept = found["race"], {key: one for key, one in found.items() if key != "race"}
    sentence = race.get("sentence") if isinstance(race, dict) else None
    return {**kept, "comparisons": [], "sentence": sentence}


def notebook_of(study: Study, header: Header) -> Notebook:
    """The notes of a study for the script and the versions of a header."""
    return Notebook(
        study=study,
        source_hash=header.source_hash,
        versions=header.versions,
        outside=frozenset(header.outside),
    )


def batch_axes_of(header: Header) -> tuple[str, ...]:
    """Axes that split the rows of a batch; by their names where nobody noted them."""
    return usual_batch_axes(header.axes) if header.batch_axes is None else header.batch_axes


def read_header(study: Study) -> Header | None:
    """The header that the last search left in a study; None if none got that far, or it is
    damaged."""
    found = study.noted("header")
    if isinstance(found, dict) and "room" in found:  # Its name in studies of former versions.
        found = {**found, "device_memory": found["room"]}
        del found["room"]
    header = study.read_note("header", _with_parts(found), Header)
    return None if header is None else _without_secrets(header)


def _with_parts(found: Any) -> Any:
    """A header of a version that kept its command as a text: only the parts of it that are known
    ones are read."""
    if not isinstance(found, dict) or "command" not in found:
        return found
    kept = {key: one for key, one in found.items() if key != "command"}
    command = read_text(str(found["command"]))
    return {**kept, "again": None if command is None else to_json(command, SearchCommand)}


def _without_secrets(header: Header) -> Header:
    """The header as it may be shown: former versions have masked only simple passwords."""
    return replace(
        header,
        location=masked_url(header.location),
        template=masked_template(header.template),
        notices=tuple(masked(notice) for notice in header.notices),
    )


# What a search notes at its start, and how it says that its time is over.


def header_of(
    request: SearchRequest,
    preparation: Preparation,
    estimates: Estimates,
    study: Study,
    *,
    is_ahead: bool = False,
) -> Header:
    """What a search knows before anything is compiled.

    Args:
      is_ahead: the devices are not here.
    """
    enumeration, inspection = preparation.enumeration, preparation.inspection
    extra = len(preparation.plans) - len(enumeration.legal)  # a baseline outside of the space
    return Header(
        workload=workload_name(request.entry),
        target=preparation.selector,
        platform=preparation.aim.platform,
        device_kind=preparation.aim.device_kind,
        device_count=preparation.aim.num_devices,
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        enumerated=enumeration.num_plans + extra,
        plans=len(preparation.plans),
        ruled_out=tuple((rejection.rule, rejection.count) for rejection in enumeration.rejections),
        baseline=preparation.baseline,
        notices=notices_of(preparation, estimates),
        details=estimates.details,
        made_up=inspection.made_up,
        tokens_per_step=inspection.tokens_per_step,
        location=shown_location(study),
        results_dir=as_seen(preparation.folder),
        again=request.again,
        source_hash=preparation.source_hash,
        versions=preparation.provenance,
        speeds=estimates.origin,
        estimated=len(estimates.found),
        refused=estimates.refusals,
        fabric=estimates.fabric,
        is_ahead=is_ahead,
        device_memory=preparation.device_memory,
        axis_types=preparation.axis_types,
        batch_axes=preparation.batch_axes,
        split=preparation.split,
        not_searched=preparation.not_searched,
        arguments=preparation.arguments,
        outside=_outside(preparation, study, is_ahead=is_ahead),
    )


def _outside(preparation: Preparation, study: Study, *, is_ahead: bool) -> tuple[str, ...]:
    """Plans that were searched here before, for this script, and are not legal now."""
    mine = (preparation.source_hash, preparation.provenance)
    legal = frozenset(preparation.plans)
    rungs = [study.compile, study.measure, *([study.screen] if is_ahead else [])]
    known = dict.fromkeys(
        trial.plan for rung in rungs for trial in rung.trials() if trial.matches(*mine)
    )
    return tuple(str(plan) for plan in known if plan not in legal)


def shown_location(study: Study) -> str:
    """Where the trials of a study are, for people."""
    storage = study.storage
    return storage.text if storage.kind == "server" else as_seen(storage.location)


def spent(budget_s: float) -> str:
    """`the budget of 10 min was spent`."""
    text = format_wait(budget_s) if budget_s >= 120 else f"{budget_s:.0f} s"
    return f"the budget of {text} was spent"


# Opening a study that is there, to read it.


def _holds_something(path: Path) -> bool:
    """Whether a file is there, and not empty: to open an empty one would make a storage of it."""
    check_regular(path)
    return path.is_file() and path.stat().st_size > 0


@contextmanager
def reading(
    study: Path | None, *, results: Path, storage: str, in_place: bool = True
) -> Generator[tuple[Path, Study, Header]]:
    """Opens a study; gives its folder, the study, and what its search knew when it started.

    Args:
      study: its folder; None for the one that changed last under `results`.
      in_place: as of `open_backend`.

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
    """The header of an open study.

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
