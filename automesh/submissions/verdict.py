"""What the exit code of a search means for its submission."""

from __future__ import annotations

from pathlib import Path

from automesh.submissions.process import last_error
from automesh.submissions.store import Store, Submission


def end_run(
    store: Store, number: str, code: int | None, job: Path, *, is_meant: bool
) -> Submission:
    """Ends the run of a submission, and says how it did.

    Args:
      code: exit code of `automesh search`; None if it was cut short.
      job: folder of the submission, with the log of the search.
      is_meant: whoever ran it was told to end.

    Returns:
      The submission: queued again if the search was cut short.
    """
    match code:
        case 0:
            return store.end(number, "found", "a rule was found")
        case 1:
            return store.end(number, "nothing", last_error(job) or "nothing may become a rule")
        case 2:
            return store.end(number, "failed", last_error(job) or "the search was refused")
        case _:
            return store.cut(number, is_meant=is_meant)
