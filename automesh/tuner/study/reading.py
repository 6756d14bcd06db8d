"""Opening a study that is there, to read it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from automesh.errors import UsageError
from automesh.tuner.paths import newest_study
from automesh.tuner.study.metadata import Header, read_header
from automesh.tuner.study.study import Study, open_study, parse_storage


@contextmanager
def reading(
    study: Path | None, *, results: Path, storage: str
) -> Generator[tuple[Path, Study, Header]]:
    """Opens a study; gives its folder, the study, and what its search knew when it started.

    Args:
      study: its folder; None for the one that changed last under `results`.

    Raises:
      UsageError: there is no such study, or it cannot be read.
    """
    folder = newest_study(results, storage) if study is None else study
    place = parse_storage(storage, folder)
    if place.kind != "server" and not Path(place.location).is_file():
        raise UsageError(
            f"there is no study in `{folder}`",
            hint="give the folder of a study, as `search` printed it, or its --storage",
        )
    with open_study(place, folder.resolve().name, create=False) as opened:
        header = read_header(opened)
        if header is None:
            raise UsageError(
                f"the study in `{folder}` holds nothing yet", hint="run its search first"
            )
        yield folder, opened, header
