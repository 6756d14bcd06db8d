"""The files that a command writes beside what it prints: SARIF, JUnit XML, Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from automesh.errors import UsageError
from automesh.files import check_place
from automesh.report.files.csv import write_text
from automesh.texts.user_text import user_path

_HINT = "name a file in a folder that you may write to"


def place_of(text: str) -> Path:
    """Checks, before minutes of work, that a file can be written; makes its folder.

    Raises:
      UsageError: it is no path, or cannot be written.
    """
    path = user_path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_place(path)
    except FileExistsError:
        raise UsageError(
            f"`{text}` cannot be written: `{path.parent}` is no folder", hint=_HINT
        ) from None
    except OSError as error:
        raise UsageError(
            f"`{text}` cannot be written: {(error.strerror or str(error)).lower()}", hint=_HINT
        ) from None
    return path


def write_beside(files: Iterable[tuple[Path, str]]) -> None:
    """Writes files with their texts, the others as well if one of them cannot be written.

    Raises:
      UsageError: of the first file that cannot be written.
    """
    wrong: list[UsageError] = []
    for path, text in files:
        try:
            write_text(text, path, hint=_HINT)
        except UsageError as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]
