"""Describes what went wrong in a worker: one sentence, and the user's part of a traceback."""

from __future__ import annotations

import resource
import signal
import sys
import traceback
from collections.abc import Sequence

from automesh.errors import AutomeshError
from automesh.outcomes import Failed, Failure, OutOfMemory
from automesh.package import is_our_module, our_folders
from automesh.texts.exceptions import MOST_CHARS_READ, said_by, sentence_of, shortened
from automesh.texts.terminal import as_unicode

# The exception by which job code in a worker reports a failure that is an outcome, not a crash.


class OutcomeError(Exception):
    """Carries a finished `Failure` (such as `OutOfMemory`) from the job to the parent unchanged."""

    def __init__(self, outcome: Failure) -> None:
        super().__init__(outcome)
        self.outcome = outcome


_DOING = {
    "start": "starting",
    "load": "loading the script",
    "build": "building the step",
    "lower": "lowering the step",
    "compile": "compiling",
    "materialize": "making the arguments",
    "run": "running the step",
    "layout": "laying meshes out",
    "propagate": "propagating shardings",
    "calibrate": "measuring the devices",
}
# The beginning of the reason if a script failed before it reached its step.
ON_THIS_MESH = "on this mesh "
_TAIL_LINES = 40
_TAIL_CHARS = 6000


def stage_words(stage: str) -> str:
    """Returns a word for what a worker does in a stage: `compiling`."""
    return _DOING.get(stage, stage)


def failure(error: BaseException, *, stage: str, function: str, limit_bytes: int) -> Failure:
    """Returns the failure that an exception in a job means.

    Args:
      error: any exception, also `SystemExit` and `KeyboardInterrupt`.
      stage: the stage in which it was raised.
      function: name of the user's build function.
      limit_bytes: memory that the worker may hold.
    """
    match error:
        case OutcomeError():
            return error.outcome
        case AutomeshError():
            return Failed(stage=stage, reason=error.message, hint=error.hint)
        case MemoryError():
            detail = (
                sentence_of(error)
                if said_by(error)
                else f"Python ran out of memory while {stage_words(stage)}"
            )
            return OutOfMemory(
                stage=stage, needed_bytes=peak_bytes(), limit_bytes=limit_bytes, detail=detail
            )
        case SystemExit():
            # Its last output (of argparse, say) explains more than a traceback; the parent adds it.
            return Failed(stage=stage, reason=f"the script called sys.exit({_argument(error)})")
        case _ if is_our_module(type(error).__module__):
            # An error of automesh about a script: the name of its class has no meaning for the
            # user.
            said = said_by(error).strip().splitlines()
            reason = ON_THIS_MESH + shortened(said[0] if said else "the script cannot be run")
            return Failed(stage=stage, reason=reason, log_tail=user_traceback(error))
        case _:
            reason = f"{_raised(stage, function)} {sentence_of(error)}"
            return Failed(stage=stage, reason=reason, log_tail=user_traceback(error))


def replaced_builtins(names: Sequence[str]) -> str:
    """Returns advice about builtins that user code has replaced, since other code calls them,
    too."""
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    what = "builtins" if len(names) > 1 else "builtin"
    return f"the script replaces the {what} {shown}, which jax and automesh call: do not replace it"


def hint_where_replaced(names: Sequence[str], outcome: Failed) -> str:
    """Returns the hint for a failure after user code has replaced builtins."""
    hint = replaced_builtins(names)
    # If jax could not start for this reason, its own hint is misleading. So may be a refusal: with
    # a wrong `len`, a function seems to have other parameters.
    if not outcome.hint or outcome.stage == "start":
        return hint
    return f"{hint}; if it was not that: {outcome.hint}"


def ended(code: int | None, stage: str) -> str:
    """Returns a sentence on a worker that ended without an answer; `code` is negative for a
    signal."""
    if code is None:
        return f"the worker was lost while {stage_words(stage)}"
    if code >= 0:
        return f"the worker exited with code {code} while {stage_words(stage)}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the worker was killed by {name} while {stage_words(stage)}"


def user_traceback(error: BaseException) -> str:
    """Returns the end of the traceback without the frames of automesh and of the import system."""
    report = traceback.TracebackException.from_exception(error, compact=True)
    _drop_our_frames(report)
    lines = as_unicode("".join(report.format())[-MOST_CHARS_READ:]).rstrip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]


def peak_bytes() -> int:
    """Returns the peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _raised(stage: str, function: str) -> str:
    match stage:
        case "start":
            return "the worker could not start:"
        case "load":
            return "the script raised"
        case "build":
            return f"`{function}` raised"
        case "run":
            return "the step raised"
        case _:
            return f"{stage_words(stage)} raised"


def _argument(error: SystemExit) -> str:
    if error.code is None:
        return ""
    try:
        return shortened(as_unicode(repr(error.code)))
    except BaseException:  # noqa: BLE001 - as above, for the user's __repr__
        return f"{type(error.code).__name__}(...)"


def _drop_our_frames(report: traceback.TracebackException) -> None:
    """Keeps only frames of the user's code and of libraries, in an exception and all its causes."""
    waiting, seen = [report], set[int]()
    while waiting:  # No recursion: user code may chain a thousand exceptions.
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        theirs = [
            frame
            for frame in one.stack
            if not frame.filename.startswith((*our_folders(), "<frozen importlib", "<frozen runpy"))
        ]
        one.stack = traceback.StackSummary.from_list(theirs)
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
