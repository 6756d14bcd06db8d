"""The record of a run without arrays: what it holds, what it was asked, and the value that was
missing (jax)."""

from __future__ import annotations

import inspect
import linecache
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from jax.sharding import Sharding

from automesh.errors import UsageError
from automesh.package import is_users_file
from automesh.program.capture.frames import asking_line
from automesh.program.capture.nouns import SourceLine


class ValueNeeded(UsageError):
    """The error that Python needs the value of an array without data."""


@dataclass(slots=True)
class ArraysState:
    """The data of this process about the run without arrays.

    Attributes:
      trace: the trace in force while a script runs without its arrays.
      alive_bytes, most_bytes: bytes of the arrays that the script holds now, and the most that it
        held.
      printed: for each line that was given `nan` for a number, how often.
      decided: the first line that compared a number that was `nan`.
      needed: the last value that Python asked for in vain.
      compiled: the shardings of the results of each operation that was compiled to find them.
    """

    trace: Any = None
    is_installed: bool = False
    alive_bytes: int = 0
    most_bytes: int = 0
    printed: dict[SourceLine, int] = field(default_factory=dict[SourceLine, int])
    decided: SourceLine | None = None
    needed: ValueNeeded | None = None
    compiled: dict[Any, tuple[Sharding | None, ...]] = field(
        default_factory=dict[Any, "tuple[Sharding | None, ...]"]
    )


STATE = ArraysState()
# A line that reads so many numbers waits for one that is never nan: `while True: ... if err < 0.1`.
_MOST_READS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The record of the last run without arrays.

    Attributes:
      most_bytes: the most bytes of arrays that the script held at the same time.
      printed: lines that were given `nan` for a number.
      decided: the first line that compared such a number; None if there was none.
      needed: the error for the last value that Python asked for in vain, even if the script caught
        it; None if there was none.
    """

    most_bytes: int
    printed: tuple[SourceLine, ...]
    decided: SourceLine | None
    needed: ValueNeeded | None


def seen() -> Seen:
    """Returns what the last run without arrays did."""
    return Seen(
        most_bytes=STATE.most_bytes,
        printed=tuple(STATE.printed),
        decided=STATE.decided,
        needed=STATE.needed,
    )


def note_read() -> SourceLine:
    """Notes that the line of the script that runs now is given `nan` for a number.

    Raises:
      ValueNeeded: it was given so many that it seems to wait for another number.
    """
    place = asking_line()
    STATE.printed[place] = STATE.printed.get(place, 0) + 1
    if STATE.printed[place] > _MOST_READS:
        raise needed_at_line(f"reads a number more than {_MOST_READS:,} times", place)
    return place


def needed_at_line(what: str, place: SourceLine | None = None) -> ValueNeeded:
    """Returns the error that a line of the script, by default the one that runs now, needs arrays
    that have no data."""
    STATE.needed = ValueNeeded(
        f"{place or asking_line()} {what}, which is not there: the script is run without the data "
        "of its arrays",
        hint="do without it before the third call of the step, or write a function `build(mesh)`",
    )
    return STATE.needed


def needed(array: Any) -> ValueNeeded:
    """Returns the error that a line of the script needs the value of an array without data."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    place, name, code = asking_line(), "", ""
    if frame is not None:
        names = [name for name, value in frame.f_locals.items() if value is array]
        name, code = names[0] if names else "", _code_at(frame)
    aval: Any = array.aval
    what = f"`{name}`" if name else f"an array {aval.str_short()}"
    what += f" for `{code}`" if code else ""
    STATE.needed = ValueNeeded(
        f"{place} needs the value of {what}, which is not there: the script is run without the "
        "data of its arrays",
        hint="do without it before the third call of the step, or write a function `build(mesh)`; "
        "a single floating number can be printed, read and compared, as nan",
    )
    return STATE.needed


def _code_at(frame: FrameType) -> str:
    """Returns the source text of what a frame is about to do; empty if that is long."""
    positions = list(frame.f_code.co_positions())[: frame.f_lasti // 2 + 1]
    # In Python 3.11 a jump has the place of its whole `if` statement; its condition stands before.
    on_one_line = (one for one in reversed(positions[-2:]) if one[0] == one[1])
    line, _, first, end = next(on_one_line, (None,) * 4)
    if line is None:
        return ""
    # Python counts columns in bytes.
    text = linecache.getline(frame.f_code.co_filename, line).encode()[first:end].decode()
    return text if len(text) <= 60 else ""
