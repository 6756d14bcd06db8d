"""All studies of a service: which there are, and what each of them says, kept up to date.

Studies lie in folders of results, each with a database of its own, or all in one storage. To read
one takes tens of milliseconds, so each is read once, and again when it has changed: that is told
by its files, or by what a database counts, which costs one query for all of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from automesh.errors import AutomeshError, NoFeasibleMesh
from automesh.jsonio import to_text
from automesh.report import words
from automesh.report.files.rule import rule_of, rule_text
from automesh.report.result import SearchResult
from automesh.skipped import reason_of
from automesh.texts.terminal import clean
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.metadata import reading
from automesh.tuner.study.results import NOT_ENDED
from automesh.tuner.study.storage import Storage, parse_storage

if TYPE_CHECKING:
    from automesh.tuner.study.backend import Backend

State = Literal["unread", "running", "interrupted", "stopped", "ended", "unreadable"]
Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """What a list of studies shows of one.

    Attributes:
      state: `running` while somebody searches; `ended` by itself, `interrupted` by somebody,
        `stopped` without a word; `unread` until it was looked at.
      sentence: what is known of the best plan.
      evidence: measured, compiled, estimated or none.
      step_s: of the best plan; None without one.
      speedup: over the script's own plan, from fresh processes; None without.
      legal, compiled, measured, failed, waiting: numbers of plans.
      has_rule: a rule was earned.
      made: when it was decided, as text; empty before.
      problem: why it cannot be read; empty if it can.
    """

    name: str
    workload: str = ""
    target: str = ""
    device: str = ""
    device_count: int = 0
    state: State = "unread"
    sentence: str = ""
    evidence: str = "none"
    plan: str = ""
    step_s: float | None = None
    speedup: float | None = None
    legal: int = 0
    compiled: int = 0
    measured: int = 0
    failed: int = 0
    waiting: int = 0
    has_rule: bool = False
    made: str = ""
    changed_s: float = 0.0
    stop_reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStudy:
    """A study as it was read last.

    Attributes:
      folder: where its logs and estimates are.
      storage: that it is in; empty for SQLite in its folder.
      rule: the text of its rule file; empty without a rule.
      missing: why there is none.
      stamp: by which a change is told.
      read_s: when it was read, by a clock that nobody sets.
    """

    summary: StudySummary
    folder: Path
    storage: str = ""
    rule: str = ""
    missing: str = "the study was not read yet"
    stamp: Stamp = ()
    read_s: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStudy:
    """A study as lists need it, made once for each summary.

    Attributes:
      words: in which a search looks, in small letters.
      text: the summary as JSON.
    """

    summary: StudySummary
    words: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What is looked up in the studies of one moment.

    Attributes:
      known: the studies that it is of.
      listed: the one that changed last first.
      below: names by the folder that their folders lie in, in order.
    """

    known: Mapping[str, KnownStudy]
    listed: tuple[ListedStudy, ...]
    below: Mapping[Path, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A study that is there, before it is read; `storage` as of `KnownStudy`."""

    folder: Path
    storage: str
    stamp: Stamp
    changed_s: float


class Catalogue:
    """The studies in several folders of results, and in a storage.

    `refresh` is called by one thread, everything else by any.

    Args:
      roots: gives the folders of results, which may become more.
      storage: as `--storage` of the searches; empty for SQLite in each study's folder.
      pause_s: before a study that has changed is read again: one that is searched changes all the
        time, and who measures must not be disturbed.
    """

    def __init__(
        self, roots: Callable[[], Sequence[Path]], storage: str = "", *, pause_s: float = 0.0
    ) -> None:
        self._pause_s = pause_s
        self._roots = roots
        self._storage = storage
        self._place: Storage | None = parse_storage(storage, Path()) if storage else None
        self._backend: Backend | None = None
        self._known: Mapping[str, KnownStudy] = {}
        self._index = Index(known=self._known, listed=(), below={})
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def known(self) -> Mapping[str, KnownStudy]:
        """By name; what it returns never changes."""
        return self._known

    def get(self, name: str) -> KnownStudy | None:
        """A study by its exact name: nothing of the name becomes a path."""
        return self._known.get(name)

    def listed(self) -> tuple[ListedStudy, ...]:
        """All studies for a list, the one that changed last first."""
        return self._indexed().listed

    def below(self, folder: Path) -> tuple[str, ...]:
        """Names of the studies whose folders lie in a folder, in order."""
        return self._indexed().below.get(folder, ())

    def _indexed(self) -> Index:
        """The index of what is known now, made when somebody asks for it first."""
        with self._lock:
            if self._index.known is not self._known:
                self._index = _index(self._known, self._index)
            return self._index

    def read(self, known: KnownStudy) -> SearchResult:
        """Everything that a study holds now.

        Raises:
          UsageError: it cannot be read, or is not there any more.
        """
        folder = known.folder
        with reading(folder, results=folder.parent, storage=known.storage) as (_, study, header):
            return assemble(study, header)

    def refresh(self, most: int = 20) -> bool:
        """Looks which studies there are, and reads up to `most` of those that have changed: who
        changed last comes first.

        Returns:
          Whether some are left to be read.
        """
        there = self._there()
        known = dict(self._known)
        for name, found in there.items():
            if name not in known:
                summary = StudySummary(name=name, changed_s=found.changed_s)
                known[name] = KnownStudy(
                    summary=summary, folder=found.folder, storage=found.storage
                )
        known = {name: one for name, one in known.items() if name in there}
        now_s = time.monotonic()
        stale = [
            name
            for name, one in known.items()
            if now_s - one.read_s >= self._pause_s
            # Whether its process still lives is in no stamp.
            and (one.stamp != there[name].stamp or one.summary.state == "running")
        ]
        stale.sort(key=lambda name: -there[name].changed_s)
        self._publish(known)
        for name in stale[:most]:
            self._publish({**self._known, name: self._read(name, there[name])})
        return len(stale) > most

    def _publish(self, known: Mapping[str, KnownStudy]) -> None:
        with self._lock:
            self._known = known

    def _there(self) -> dict[str, Found]:
        """The studies that are there. One that is in two folders counts in the first."""
        found: dict[str, Found] = {}
        roots = list(self._roots())
        # Of a service with a storage, only agents keep studies in folders, which are below jobs.
        for root in roots if self._place is None else roots[1:]:
            for folder, stamp, changed_s in _folders(root):
                one = Found(folder=folder, storage="", stamp=stamp, changed_s=changed_s)
                found.setdefault(folder.name, one)
        if self._place is None:
            return found
        # Here and not above: `automesh --help` must not wait for Optuna and SQLAlchemy.
        from automesh.tuner.study.backend import open_backend

        if self._backend is None:
            self._backend = open_backend(self._place)
        with self._backend.explained():
            changes = self._backend.changes()
        folders = {one.name: one for root in reversed(roots) for one in _below(root)}
        first = next(iter(roots), Path())
        for name, (stamp, changed_s) in changes.items():
            folder = folders.get(name, first / name)
            found[name] = Found(
                folder=folder, storage=self._storage, stamp=stamp, changed_s=changed_s
            )
        return found

    def _read(self, name: str, found: Found) -> KnownStudy:
        folder = found.folder
        seen = KnownStudy(
            summary=StudySummary(name=name, changed_s=found.changed_s),
            folder=folder,
            storage=found.storage,
            stamp=found.stamp,
            read_s=time.monotonic(),
        )
        try:
            with reading(folder, results=folder.parent, storage=found.storage) as opened:
                _, study, header = opened
                result = assemble(study, header)
                is_running = study.leader() is not None
        except Exception as error:  # noqa: BLE001  One study that somebody broke hides no others.
            reason = reason_of(error)
            summary = replace(seen.summary, state="unreadable", problem=reason)
            return replace(seen, summary=summary, missing=reason)
        summary = summary_of(name, result, is_running=is_running)
        rule, missing = rule_or_reason(result)
        summary = replace(summary, changed_s=found.changed_s)
        return replace(seen, summary=summary, rule=rule, missing=missing)


def _index(known: Mapping[str, KnownStudy], former: Index) -> Index:
    """The index of some studies; of those whose summaries are the former ones it is taken over."""
    before = {id(one.summary): one for one in former.listed}
    listed: list[ListedStudy] = []
    below: dict[Path, list[str]] = {}
    for name, one in known.items():
        # The former index holds the summaries, so that none of them has the place of another one.
        listed.append(before.get(id(one.summary)) or _listed(one.summary))
        below.setdefault(one.folder.parent, []).append(name)
    listed.sort(key=lambda one: (-one.summary.changed_s, one.summary.name))
    return Index(
        known=known,
        listed=tuple(listed),
        below={folder: tuple(sorted(names)) for folder, names in below.items()},
    )


def _listed(one: StudySummary) -> ListedStudy:
    words = (one.name, one.workload, one.target, one.device, one.plan, one.state)
    return ListedStudy(summary=one, words=" ".join(words).lower(), text=to_text(one, StudySummary))


def rule_or_reason(result: SearchResult) -> tuple[str, str]:
    """The text of the rule file, or why there is none."""
    try:
        return rule_text(result), ""
    except NoFeasibleMesh as error:
        return "", error.message
    except AutomeshError as error:
        return "", error.message


def summary_of(name: str, result: SearchResult, *, is_running: bool) -> StudySummary:
    """What a list shows of a study that was read."""
    best, funnel = words.best_of(result), result.funnel
    last = result.verifications[-1] if result.verifications else None
    state: State = "interrupted" if result.interrupted else "ended"
    if result.stop_reason == NOT_ENDED:
        state = "stopped"
    return StudySummary(
        name=name,
        workload=clean(result.workload),
        target=clean(result.target),
        device=clean(result.device),
        device_count=result.device_count,
        state="running" if is_running else state,
        sentence=clean(words.best_sentence(result) or ""),
        evidence=words.evidence(best) if best is not None else "none",
        plan=str(best.plan) if best is not None else "",
        step_s=_finite(words.step_s(best)) if best is not None else None,
        speedup=_finite(last.speedup) if last is not None and last.baseline else None,
        legal=funnel.legal,
        compiled=funnel.compiled + funnel.duplicates,
        measured=funnel.measured,
        failed=funnel.failed + funnel.out_of_memory + funnel.timed_out,
        waiting=funnel.waiting,
        has_rule=_has_rule(result),
        made=result.made,
        stop_reason=clean(result.stop_reason),
    )


def _finite(figure: float | None) -> float | None:
    """A figure that JSON has a word for. One study with another would spoil the list for all."""
    return figure if figure is not None and math.isfinite(figure) else None


def _has_rule(result: SearchResult) -> bool:
    try:
        rule_of(result)
    except AutomeshError:
        return False
    return True


def _below(root: Path) -> Iterator[Path]:
    """Folders in a folder of results; links are not followed: others may have put them there."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return
    yield from (one for one in entries if not one.is_symlink() and one.is_dir())


def _folders(root: Path) -> Iterator[tuple[Path, Stamp, float]]:
    """Studies with a database of their own, when they changed, and what tells that they did."""
    for folder in _below(root):
        stamp: list[object] = []
        changed_s = 0.0
        for name in ("study.db", "study.db-wal"):
            try:
                status = (folder / name).lstat()
            except OSError:
                continue
            stamp += [name, status.st_mtime_ns, status.st_size]
            # An empty log is made by whoever reads, too.
            if status.st_size:
                changed_s = max(changed_s, status.st_mtime)
        if stamp and stamp[0] == "study.db":
            yield folder, tuple(stamp), changed_s
