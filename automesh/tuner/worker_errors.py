"""Errors for the user from failures that are not caused by a plan."""

from __future__ import annotations

import re
from pathlib import Path

from automesh.errors import UsageError
from automesh.outcomes import Failed, Failure, OutOfMemory, TimedOut
from automesh.package import is_users_file
from automesh.platforms.allowed import limits_hint
from automesh.program.nouns import Entry
from automesh.space.space import SearchSpace
from automesh.units import format_wait

_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+),?(?: in (?P<function>.+))?')
_CODE = "    "  # the indent of code in tracebacks
_UNDERLINE = re.compile(r"\s*[~^]+\s*")
_TRACEBACK = "Traceback (most recent call last):"
# jax's message about a PartitionSpec (jax/_src/named_sharding.py), and Python's about
# `mesh.shape[...]`.
_NO_SUCH_AXIS = re.compile(r"Resource axis: (?P<axis>\w+) of ")
_NO_SUCH_KEY = re.compile(r"raised KeyError: '(?P<axis>\w+)'")
_FATAL = "Fatal Python error: "  # the message of faulthandler, whose frames have no lines of code
_JAX_NOTE = "For simplicity, JAX has removed its internal frames"
_MOST_LINES = 8
# Endings, as in `worker.blame.ended`, that the script may not have caused.
_SUDDEN = ("the worker exited", "the worker was", "the worker could not")


def inspection_error(
    answer: Failure,
    entry: Entry,
    space: SearchSpace | None = None,
    *,
    late: str = "find what it waits for, or raise --timeout",
) -> UsageError:
    """Returns the error for a script whose inspection failed.

    Args:
      space: the space with the axes of the script's mesh; None if the script made its own mesh.
      late: what to do if it has not ended in time.
    """
    match answer:
        case TimedOut():
            return UsageError(
                f"{_unfinished(answer, entry)} within {format_wait(answer.limit_s)}",
                hint=_with_output(
                    "look at what else this machine is doing" if answer.stage == "start" else late,
                    answer.log_tail,
                ),
            )
        case OutOfMemory():
            return UsageError(
                f"the script ran out of memory: {answer.detail}",
                hint=limits_hint()
                or "return `jax.ShapeDtypeStruct`s instead of arrays, or raise --worker-memory",
            )
        case Failed():
            backend = answer.reason.partition("Unable to initialize backend")
            if backend[1]:
                return UsageError(
                    f"jax cannot start: unable to initialize backend{backend[2]}",
                    hint="check JAX_PLATFORMS, or search virtual devices: `--target cpu:8`",
                )
            missing = _missing_axis(answer, space) if space is not None else ""
            if space is not None and missing:
                return _without_axis(missing, answer, entry, space)
            where = f"{answer.where}: " if answer.where else ""
            return UsageError(where + answer.reason, hint=_hint(answer, entry))


def raised_here(failed: Failed, entry: Entry) -> str:
    """Returns lines for the hint: where the user's code raised a failure, if it did."""
    return _hint(failed, entry)


def innermost_frame(tail: str) -> str:
    """Returns the last line of the user's own code in a traceback, as `train.py:7`; empty if there
    is none."""
    found = [
        frame
        for line in tail.splitlines()
        if (frame := _FRAME.fullmatch(line)) is not None and is_users_file(frame["file"])
    ]
    return f"{Path(found[-1]['file']).name}:{found[-1]['line']}" if found else ""


def _missing_axis(answer: Failed, space: SearchSpace) -> str:
    """Returns the mesh axis that the script uses but that does not exist; empty if that is not the
    error."""
    if found := _NO_SUCH_AXIS.search(answer.reason):
        return found["axis"]
    # The message for `mesh.shape["data"]` only contains the name.
    found = _NO_SUCH_KEY.search(answer.reason)
    frames = _user_frames(answer.log_tail)
    asked = found is not None and bool(frames) and ".shape" in frames[-1]
    return found["axis"] if found is not None and asked and found["axis"] not in space.names else ""


def _without_axis(axis: str, answer: Failed, entry: Entry, space: SearchSpace) -> UsageError:
    if space.shipped:
        what = (
            "list the script's own axes in a file, for example `mesh_space.toml` with "
            f"`[axes]` and a line `{axis} = {{}}` for each of them, and name it with --space"
        )
    else:
        what = (
            f"add `{axis} = {{}}` under [axes] of `{space.name}`, or "
            f"`{axis} = {{ size = 1 }}` to leave it unused"
        )
    return UsageError(
        f"`{entry.function}` uses the mesh axis `{axis}`, but the mesh has the axes of the space "
        f"`{space.name}`: {', '.join(space.names)}",
        hint="\n".join([f"{what}; it is used here:", *_user_frames(answer.log_tail)]),
    )


def refuse_to_blame(result: object) -> None:
    """Raises an error if the machine failed, and not the plan.

    Raises:
      UsageError: a worker could not start; all other plans would fail in the same way.
    """
    if isinstance(result, Failure) and result.stage == "start":
        raise machine_error(result)


def machine_error(failure: Failure) -> UsageError:
    """Returns the error for a worker that could not start."""
    hint = "mend it and run the same command again; what is finished is kept"
    match failure:
        case Failed():
            where = f"{failure.where}: " if failure.where else ""
            return UsageError(where + failure.reason, hint=failure.hint or limits_hint() or hint)
        case TimedOut():
            waited = format_wait(failure.limit_s)
            return UsageError(f"a worker did not start within {waited}", hint=hint)
        case OutOfMemory():
            return UsageError(
                f"a worker ran out of memory at its start: {failure.detail}", hint=hint
            )


def _unfinished(answer: TimedOut, entry: Entry) -> str:
    match answer.stage:
        case "start":
            return "the worker did not start"
        case "load":
            return f"importing `{_name(entry)}` did not end"
        case "build":
            running = f"`{_name(entry)}`, run up to its training step,"
            return (
                f"`{entry.function}` did not return" if entry.function else f"{running} did not end"
            )
        case _:
            return "lowering the step did not end"


def _hint(answer: Failed, entry: Entry) -> str:
    if answer.hint:
        # The script's last output before it ended itself is most often the reason.
        ended = " ended with exit code " in answer.reason
        return _with_output(answer.hint, answer.log_tail) if ended else answer.hint
    if answer.reason.startswith("the script called sys.exit"):
        what = "pass its arguments after --, and guard what trains with `if __name__ == ...`"
        return _with_output(what, answer.log_tail)
    frames = _user_frames(answer.log_tail)
    low = limits_hint() if answer.reason.startswith(_SUDDEN) or answer.stage == "start" else ""
    if low:
        return _with_output(low, answer.log_tail)
    if answer.reason.startswith("the worker"):
        what = f"find what ends or breaks the process in `{_name(entry)}`"
        return "\n".join([_with_output(what, answer.log_tail), *frames])
    if frames:
        return "\n".join(["it was raised here:", *frames, *_rest_of_message(answer.log_tail)])
    where = _foreign_frame(answer.log_tail)
    if where:
        return f"it was raised in a library: {where}; nothing of it is in `{_name(entry)}`"
    return ""


def _name(entry: Entry) -> str:
    return Path(entry.location).name if entry.kind == "script" else entry.location


def _with_output(hint: str, tail: str) -> str:
    """Returns the hint with the script's last output before it ended, without any traceback of
    automesh."""
    output = tail.partition(_TRACEBACK)[0].partition(_FATAL)[0]
    printed = [line.rstrip() for line in output.splitlines()]
    lines = [f"  {line}" for line in printed if line][-_MOST_LINES:]
    return "\n".join([f"{hint}; the end of its output:", *lines]) if lines else hint


def _user_frames(tail: str) -> list[str]:
    """Returns only the user's own frames, the innermost last: `  train.py:7 in helper: return x @
    y`."""
    found: list[str] = []
    lines = tail.splitlines()
    for number, line in enumerate(lines):
        frame = _FRAME.fullmatch(line)
        if frame is None or not is_users_file(frame["file"]):
            continue
        has_code = number + 1 < len(lines) and _FATAL not in tail
        code = lines[number + 1].strip() if has_code else ""
        where = f"  {frame['file']}:{frame['line']}"
        where += f" in {frame['function']}" if frame["function"] else ""
        text = f"{where}: {code}" if code and not _FRAME.fullmatch(lines[number + 1]) else where
        if text not in found:
            found.append(text)
    return found[-_MOST_LINES:]


def _foreign_frame(tail: str) -> str:
    """Returns the last line of a traceback, as `/usr/lib/optax.py:7 in update`; empty if there is
    none."""
    found = [frame for line in tail.splitlines() if (frame := _FRAME.fullmatch(line)) is not None]
    if not found:
        return ""
    function = f" in {found[-1]['function']}" if found[-1]["function"] else ""
    return f"{found[-1]['file']}:{found[-1]['line']}{function}"


def _rest_of_message(tail: str) -> list[str]:
    """Returns the lines after the first line of the exception's message, which the error already
    has."""
    lines = tail.partition(_JAX_NOTE)[0].rstrip(" -\n").splitlines()
    last = max((number for number, line in enumerate(lines) if _FRAME.fullmatch(line)), default=-1)
    message = [line for line in lines[last + 1 :] if not _UNDERLINE.fullmatch(line)]
    # The frame's code, with several lines since Python 3.13, then the line with the exception's
    # name.
    first = next((at for at, line in enumerate(message) if not line.startswith(_CODE)), 0)
    rest = [line.rstrip() for line in message[first + 1 :] if line.strip()]
    return [f"  {line}" for line in rest[:_MOST_LINES]]
