"""A cache of propagations in the study's folder, so that a resumed search need not repeat them.

A search for another number of devices takes from it what does not depend on that number. It asks
for the same sets of active axes, only at other sizes. Where the step is the same on all meshes
(`Propagation.is_general`), the terms are formulas that hold there, too, as they hold for the larger
meshes of one search. They are found by a second name, which leaves out the sizes: a small file that
holds the first name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from automesh import limits
from automesh.cost.pricing import holds
from automesh.cost.terms import Terms
from automesh.errors import AutomeshError
from automesh.files import write_whole
from automesh.jsonio import NotJson, read_json, to_json, to_text
from automesh.program.nouns import Propagation
from automesh.reading import Unreadable, read_bytes
from automesh.skipped import Skipped
from automesh.texts.storage_url import masked_word
from automesh.tuner.estimate.propagations import Sizes
from automesh.worker.messages import PropagateJob

TERMS = "terms"  # the folder inside a study's
_FORMAT = 17  # must be raised when the terms of an unchanged step change
_SECOND_NAME = ".name"  # ends the names of files that hold the name of another one
_NAME = re.compile(rb"[0-9a-f]{32}\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPropagation:
    """A propagation with its job and versions: the content of one file in the folder.

    Attributes:
      form: format of the terms, see `_FORMAT`; 0 for old files without one.
    """

    source_hash: str
    versions: tuple[tuple[str, str], ...]
    job: PropagateJob
    propagation: Propagation
    form: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsCache:
    """Stores the answers to `PropagateJob`s by all that they depend on.

    A step that asks nothing about absent devices has the same terms for all devices of a platform;
    these are stored without the devices.

    Attributes:
      folder: holds one file per propagation; None stores nothing.
      source_hash: hash of the script.
      versions: versions of all packages that may change a program.
      others: folders of other searches, which are also searched for answers.
      skipped: collects damaged files, whose propagations are made again.
    """

    folder: Path | None
    source_hash: str
    versions: tuple[tuple[str, str], ...]
    others: tuple[Path, ...] = ()
    skipped: Skipped = field(default_factory=Skipped, compare=False)

    def find(self, job: PropagateJob) -> Propagation | None:
        """Returns the stored answer to a job; None if there is none in a readable format."""
        own = () if self.folder is None else (self.folder,)
        for folder in (*own, *self.others):
            for wanted in dict.fromkeys((job, _anywhere(job))):
                kept = self._read(folder / self._name(wanted))
                if kept is None:
                    continue
                if folder != self.folder:  # Copied, so that this study can explain its plans.
                    self.keep(job, kept.propagation)
                return kept.propagation
        for folder in (*own, *self.others):
            kept = self._read_general(folder, job)
            if kept is not None:
                self.keep(job, kept.propagation)
                return kept.propagation
        return None

    def all(self) -> tuple[StoredPropagation, ...]:
        """Returns all propagations that were stored for this script and these versions."""
        files = sorted(self.folder.glob("*.json")) if self.folder is not None else []
        found = [kept for kept in map(self._read, files) if kept is not None]
        return tuple(
            kept for kept in found if (kept.form, kept.source_hash, kept.versions) == self._mine
        )

    def keep(self, job: PropagateJob, propagation: Propagation) -> None:
        """Stores the answer to a job, completely or not at all.

        Raises:
          OSError: the folder cannot be written.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        job = job if propagation.asked else _anywhere(job)
        path = self.folder / self._name(job)
        kept = StoredPropagation(
            source_hash=self.source_hash,
            versions=self.versions,
            job=_masked(job),
            propagation=propagation,
            form=_FORMAT,
        )
        # Without fsync: there are hundreds of files, and a lost one is made again.
        write_whole(path, to_text(kept, StoredPropagation), lasting=False)
        if _may_be_general(job, propagation):
            second = self.folder / self._second_name(_general(job))
            write_whole(second, path.name, lasting=False)

    def _read_general(self, folder: Path, job: PropagateJob) -> StoredPropagation | None:
        """Returns the answer to a job at any sizes of the same axes, if it holds at those of this
        job."""
        path = folder / self._second_name(_general(job))
        if not os.path.lexists(path):
            return None
        try:
            name = read_bytes(path, limit_bytes=64)
        except Unreadable as error:
            self.skipped.note(f"`{path.parent.name}/{path.name}`", error)
            return None
        kept = self._read(folder / name.decode()) if _NAME.fullmatch(name) else None
        if kept is None or (kept.form, kept.source_hash, kept.versions) != self._mine:
            return None
        # Compared in the form in which it is stored: without secrets.
        is_same = _general(kept.job) == _masked(_general(job))
        if not is_same or not _may_be_general(kept.job, kept.propagation):
            return None
        return kept if _holds_at(kept.propagation.terms, job.sizes) else None

    def _read(self, path: Path) -> StoredPropagation | None:
        if not os.path.lexists(path):
            return None
        try:
            return read_json(read_bytes(path, limit_bytes=limits.TERMS_BYTES), StoredPropagation)
        except (NotJson, Unreadable) as error:
            self.skipped.note(f"`{path.parent.name}/{path.name}`", error)
            return None
        except AutomeshError:
            return None  # A file of another version, with other terms.

    @property
    def _mine(self) -> tuple[int, str, tuple[tuple[str, str], ...]]:
        return (_FORMAT, self.source_hash, self.versions)

    def _second_name(self, general: PropagateJob) -> str:
        return self._name(general).removesuffix(".json") + _SECOND_NAME

    def _name(self, job: PropagateJob) -> str:
        mine = [_FORMAT, self.source_hash, self.versions, to_json(job, PropagateJob)]
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        return f"{digest[:32]}.json"


def _anywhere(job: PropagateJob) -> PropagateJob:
    """Returns the job without its devices, so that it stands for any devices of its platform."""
    return replace(job, step=replace(job.step, absent=None))


def _general(job: PropagateJob) -> PropagateJob:
    """Returns the job without its devices and without the sizes of its axes."""
    sizes = tuple((axis, 0) for axis, _ in job.sizes)
    return replace(_anywhere(job), sizes=sizes, probes=(), largest=())


def _holds_at(terms: Terms, sizes: Sizes) -> bool:
    """Whether terms hold at other sizes than they were made at."""
    row = np.array([[size for _, size in sizes]], np.int64)
    return bool(holds(terms, tuple(axis for axis, _ in sizes), row)[0])


def _may_be_general(job: PropagateJob, propagation: Propagation) -> bool:
    """Whether a propagation answers jobs with other sizes, too."""
    asks_more = propagation.asked or propagation.failed_probes or propagation.results
    return propagation.is_general and not asks_more and not job.exact and job.cure is None


def _masked(job: PropagateJob) -> PropagateJob:
    """Returns the job with the secrets in the script's arguments masked. The file's name, which is
    a hash, still depends on them."""
    entry = job.step.entry
    argv = tuple(masked_word(word) for word in entry.argv)
    return replace(job, step=replace(job.step, entry=replace(entry, argv=argv)))
