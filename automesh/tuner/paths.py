"""The folders and files of a search."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from automesh.errors import UsageError
from automesh.files import is_foreign_link
from automesh.mesh.rules.file import check_mergeable
from automesh.mesh.rules.rule import MeshRule
from automesh.reading import kind_of_file
from automesh.tuner.study.storage import parse_storage

if TYPE_CHECKING:
    from automesh.tuner.request import SearchRequest


# Names in the folder of a study that anybody can know beforehand.
_PLACES = ("study.db", "study.db-wal", "study.db-shm", "study.db-journal", "logs", "terms")


def check_places(request: SearchRequest) -> tuple[MeshRule, ...]:
    """Checks, before the search spends any time, that its results can be written.

    Returns:
      The rules that the rules file has now; empty if there is none.

    Raises:
      UsageError: results, storage or rules cannot be written.
    """
    make_folder(request.results)
    storage = parse_storage(request.storage, request.results)
    if request.storage:  # A database in the study's own folder is automesh's own.
        # Imported here: `automesh --help` must not wait for Optuna and SQLAlchemy.
        from automesh.tuner.study.backend import check_storage

        check_storage(storage)
    return check_mergeable(Path(request.rules)) if request.rules else ()


def make_folder(folder: Path) -> Path:
    """Makes a folder unless it exists.

    Raises:
      UsageError: the path is a file, or the folder cannot be made or written.
    """
    hint = "choose another folder with --results"
    try:
        if folder.exists() and not folder.is_dir():
            kind = kind_of_file(folder) or "a file"
            raise UsageError(f"`{folder}` is {kind}, but results need a folder", hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"the folder `{folder}` cannot be made or written: {reason}", hint=hint
        ) from None
    return folder


def make_study_folder(folder: Path) -> None:
    """Makes the folder of a study unless it exists.

    Raises:
      UsageError: as for `make_folder`; or there is a link at a place where the study would write.
    """
    for place in (folder, *(folder / name for name in _PLACES)):
        if is_foreign_link(place):
            raise UsageError(
                f"`{place}` is a link that another account made, which could lead anywhere",
                hint="remove the link, or choose another folder with --results",
            )
    make_folder(folder)


def newest_study(results: Path, storage: str) -> Path:
    """Returns the folder of the study that changed last.

    Raises:
      UsageError: there is no study.
    """
    # In a storage of its own, a study has no database in its folder.
    marker = "logs" if storage else "study.db"
    studies: dict[Path, float] = {}
    for path in results.glob(f"*/{marker}"):
        with suppress(OSError):  # A broken link must not hide the other studies.
            studies[path.parent] = path.stat().st_mtime
    if not studies:
        raise UsageError(
            f"there is no study under `{results}`",
            hint="run `automesh search SCRIPT` first, or give the study's folder",
        )
    return max(studies, key=studies.__getitem__)


def as_seen(path: Path | str) -> str:
    """Returns a path as one would type it here: relative to the working directory if it is
    inside."""
    absolute = Path(path).absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
