"""The meaning of a search's exit code for its submission."""

from __future__ import annotations

from pathlib import Path

from automesh.texts.terminal import clean
from automesh_service.submissions.process import last_error
from automesh_service.submissions.store import Note, Store, Submission


def end_run(
    store: Store,
    number: str,
    code: int | None,
    job: Path,
    *,
    is_meant: bool,
    note: Note,
    said: str = "",
    lease: str = "",
) -> Submission:
    """Ends the run of a submission, and records how the run ended.

    Args:
      code: exit code of `automesh search`; None if it was cut short.
      job: the folder of the submission, with the log of the search.
      is_meant: whether its runner or agent was asked to end.
      said: why the search could not be started; empty if it was started.
      lease, note: see `Store.end`.

    Returns:
      The submission: queued again if the search was cut short.
    """
    match code:
        case 0:
            return store.end(number, "found", "a rule was found", lease=lease, note=note)
        case 1:
            said = last_error(job) or "nothing may become a rule"
            return store.end(number, "nothing", said, lease=lease, note=note)
        case 2:
            said = clean(said, 300) or last_error(job) or "the search was refused"
            return store.end(number, "failed", said, lease=lease, note=note)
        case _:
            return store.cut(number, is_meant=is_meant, lease=lease, note=note)
