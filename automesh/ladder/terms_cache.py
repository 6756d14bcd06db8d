"""Propagations kept in the study's folder, so that a search that goes on finds them at once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from automesh.errors import AutomeshError
from automesh.jsonio import from_json, to_json
from automesh.program.nouns import Propagation
from automesh.worker.messages import PropagateJob

TERMS = "terms"  # the folder inside a study's
_FORMAT = 1  # to be raised when the terms of an unchanged step change


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A propagation with what it was made for: what one file of the folder holds."""

    source_hash: str
    versions: tuple[tuple[str, str], ...]
    job: PropagateJob
    propagation: Propagation


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsCache:
    """Answers to `PropagateJob`s by what they depend on.

    Attributes:
      folder: one file per propagation; None keeps nothing.
      source_hash: of the script.
      versions: of everything whose change may change a program.
    """

    folder: Path | None
    source_hash: str
    versions: tuple[tuple[str, str], ...]

    def find(self, job: PropagateJob) -> Propagation | None:
        """What was kept for a job; None if nothing was, or not in a form that is read here."""
        kept = None if self.folder is None else _read(self._path(job))
        return None if kept is None else kept.propagation

    def all(self) -> tuple[Kept, ...]:
        """Everything that was kept for this script and these versions."""
        files = sorted(self.folder.glob("*.json")) if self.folder is not None else []
        found = [kept for kept in map(_read, files) if kept is not None]
        mine = (self.source_hash, self.versions)
        return tuple(kept for kept in found if (kept.source_hash, kept.versions) == mine)

    def keep(self, job: PropagateJob, propagation: Propagation) -> None:
        """Keeps the answer to a job, whole or not at all.

        Raises:
          OSError: the folder cannot be written.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(job)
        kept = Kept(
            source_hash=self.source_hash,
            versions=self.versions,
            job=job,
            propagation=propagation,
        )
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(to_json(kept, Kept), file)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, job: PropagateJob) -> Path:
        assert self.folder is not None
        mine = [_FORMAT, self.source_hash, self.versions, to_json(job, PropagateJob)]
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def _read(path: Path) -> Kept | None:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), Kept)
    except (OSError, ValueError, AutomeshError):
        # A file of another version, or of a full disk: it is made again.
        return None
