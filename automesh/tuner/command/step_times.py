"""The sources of a command's step times, and readers that read them while the command runs.

`capture` a timer inside of the command's own Python, see `program/step_timer` `jsonl:FILE[:KEY]` a
file to which the command writes a line of JSON per step, or every few steps `regex:PATTERN` what
the command prints Each call of a reader reads what is there by then. A new reader, as in a search
that was killed and resumed, reads the same steps.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from automesh import limits
from automesh.errors import AutomeshError, UsageError, did_you_mean
from automesh.jsonio import read_json
from automesh.reading import Unreadable, check_regular, open_regular
from automesh.tuner.command.line_matcher import LineMatcher
from automesh.tuner.command.template import RUN_DIR
from automesh.units import format_bytes

LOSSES = 3  # number of first losses that are compared with those of other plans
SLOW_S = 60.0  # after so many seconds of timed steps, FEW samples are enough
FEW = 3
_KINDS = "`capture`, `jsonl:FILE`, `jsonl:FILE:KEY` or `regex:PATTERN`"
_GROUPS = ("s", "ms", "steps_per_s")
# Names under which frameworks write the time of a step, without the prefix that ends with `/`.
_KEYS = re.compile(
    r"(step_time|step_duration|step_s|step_ms|step_seconds|step_time_seconds|seconds_per_step|"
    r"time_per_step|s_per_step|ms_per_step|step_time_s|step_time_ms|steps_per_s|steps_per_sec|"
    r"steps_per_second)"
)
_MARK_BYTES = 64
_LOSS_KEYS = ("loss", "train_loss", "total_loss")
_RATE = re.compile(r"steps_per_s(ec|econd)?")
_MILLISECONDS = re.compile(r"(.*_)?(ms|millis|milliseconds)(_per_step)?")
# Coarsest last: it decides how much of a difference of losses may be rounding.
_FLOATS = ("float64", "float32", "float16", "bfloat16")
TEXT_DTYPE = "bfloat16"  # of losses that are read from text, in which they may be rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSource:
    """A timer inside of the command's processes times the steps."""

    def __str__(self) -> str:
        return "capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """The steps are read from a file of JSON lines.

    Attributes:
      file: path relative to the working directory; may contain `{run_dir}`.
      key: the key of the step time; empty to look for a common one.
    """

    file: str
    key: str = ""

    def __str__(self) -> str:
        return f"jsonl:{self.file}" + (f":{self.key}" if self.key else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The steps are read from the output of the command.

    Attributes:
      pattern: a regular expression with one group, in seconds, or one of the named groups `s`, `ms`
        and `steps_per_s`; it may also have a group `loss`.
    """

    pattern: str

    def __str__(self) -> str:
        return f"regex:{self.pattern}"


Source = CaptureSource | JsonLines | Printed


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """The function that a timer took for the step.

    Attributes:
      file, line: the place of the function; empty and 0 if unknown.
      devices: the number of devices of its arrays; 0 if unknown.
    """

    name: str
    file: str = ""
    line: int = 0
    argument_bytes: int = 0
    devices: int = 0

    def __str__(self) -> str:
        where = f" ({Path(self.file).name}:{self.line})" if self.file else ""
        return f"`{self.name}`{where}, {format_bytes(self.argument_bytes)} of arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a run, as far as they are known.

    Attributes:
      samples_s: seconds per step, of the samples that count.
      seen: number of steps that were reported or timed, also those that do not count.
      losses: losses of the first steps.
      loss_dtype: the coarsest float type that the losses were computed with.
      is_enough: whether the run may end now.
      step: the step that was timed; None unless it was captured.
      problem: why nothing was found, as far as that is known, and what to do; may be empty.
    """

    samples_s: tuple[float, ...] = ()
    seen: int = 0
    losses: tuple[float, ...] = ()
    loss_dtype: str = TEXT_DTYPE
    is_enough: bool = False
    step: SeenStep | None = None
    problem: tuple[str, str] = ("", "")


def parse_source(text: str) -> Source:
    """Reads `--step-time`.

    Raises:
      UsageError: the text has none of these forms, names no file, or has a pattern without a group
        for the time of a step.
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "capture" and not rest:
        return CaptureSource()
    if kind == "jsonl":
        return _json_lines(text, rest)
    if kind == "regex":
        _check_pattern(rest)
        return Printed(pattern=rest)
    meant = did_you_mean(kind, ("capture", "jsonl", "regex"))
    raise UsageError(
        f"`{text}` is not a source of step times{meant}",
        hint=f"use {_KINDS}",
    )


def enough(samples_s: Sequence[float], steps: int) -> bool:
    """Whether there are enough samples, if each of them reports one step."""
    return len(samples_s) >= steps or (len(samples_s) >= FEW and sum(samples_s) >= SLOW_S)


def _json_lines(text: str, rest: str) -> JsonLines:
    if "://" in rest:
        raise UsageError(
            f"`{text}` is not on this machine", hint="let the command write to a local file"
        )
    file, colon, key = rest.rpartition(":")
    file, key = (file, key) if colon else (rest, "")
    if not file:
        raise UsageError(f"`{text}` names no file", hint="write `jsonl:metrics.jsonl:step_time`")
    for name in re.findall(r"\{([^{}]*)\}", file):
        if name != RUN_DIR:
            raise UsageError(
                f"`{text}` names `{{{name}}}`, but only {{run_dir}} can stand in it",
                hint="write `jsonl:{run_dir}/metrics.jsonl`, and {run_dir} in the command, too",
            )
    return JsonLines(file=file, key=key)


def _check_pattern(pattern: str) -> None:
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise UsageError(
            f"`{pattern}` is not a regular expression: {error}",
            hint="write for example `regex:step time ([0-9.]+)`",
        ) from None
    named = [name for name in found.groupindex if name in _GROUPS]
    strange = [name for name in found.groupindex if name not in (*_GROUPS, "loss")]
    if strange:
        raise UsageError(
            f"the pattern `{pattern}` has a group `{strange[0]}`"
            f"{did_you_mean(strange[0], (*_GROUPS, 'loss'))}",
            hint="named groups are s, ms, steps_per_s and loss",
        )
    unnamed = found.groups - len(found.groupindex)
    if len(named) + unnamed != 1:
        raise UsageError(
            f"the pattern `{pattern}` has {len(named) + unnamed} groups for the step time, "
            "and one is needed",
            hint="write `([0-9.]+)` for seconds, or one named group: (?P<ms>...), "
            "(?P<s>...), (?P<steps_per_s>...); `(?:...)` groups without counting",
        )


class Tail:
    """Reads the whole lines of a file that grows, from an offset on.

    Args:
      start: the offset: bytes that the file had before.
      before: the last of these bytes; if they differ now, the file was written anew and did not
        grow.
      from_end: whether to skip the contents of a file that has shrunk; otherwise it is read from
        the start.
    """

    def __init__(
        self, path: Path, *, start: int = 0, before: bytes = b"", from_end: bool = False
    ) -> None:
        self._path = path
        self._offset = start
        self._before = before
        self._from_end = from_end
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Yields the lines that were added since the last call; use all of them before the next
        call."""
        try:
            with open_regular(self._path) as file:
                yield from self._read(file)
        except (OSError, Unreadable):  # The file does not exist yet.
            return

    def _read(self, file: BinaryIO) -> Iterator[str]:
        size = file.seek(0, os.SEEK_END)
        if size < self._offset:
            self._offset, self._rest = size if self._from_end else 0, b""
        elif self._before:
            file.seek(self._offset - len(self._before))
            if file.read(len(self._before)) != self._before:
                self._offset = 0
        self._before = b""
        file.seek(self._offset)
        # No more than the size at the beginning: the command may write faster than this reads.
        while chunk := file.read(min(max(size - self._offset, 0), limits.CHUNK_BYTES)):
            self._offset += len(chunk)
            # Progress bars end their lines with a carriage return.
            *whole, self._rest = re.split(rb"\r\n|\n|\r", self._rest + chunk)
            self._rest = self._rest[: limits.REPORT_LINE_BYTES]
            for line in whole:
                if len(line) < limits.REPORT_LINE_BYTES:
                    yield line.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The length of a file before a run, and its last bytes as hexadecimal digits."""

    size: Annotated[int, Field(ge=0)] = 0
    last: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")] = ""

    @classmethod
    def of(cls, path: Path) -> Mark:
        """Returns the mark of a file as it is now; the mark of a missing file is empty."""
        try:
            with open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _MARK_BYTES, 0))
                return cls(size=size, last=file.read(_MARK_BYTES).hex())
        except (OSError, Unreadable):
            return cls()


class JsonReader:
    """Reads `JsonLines`."""

    def __init__(self, path: Path, source: JsonLines, mark: Mark, *, skip: int, steps: int) -> None:
        self._tail = Tail(path, start=mark.size, before=bytes.fromhex(mark.last))
        self._path = path
        self._key = source.key
        self._reports = _Reports(skip=skip, steps=steps)
        self._keys: dict[str, None] = {}
        self._lines = 0

    def read(self) -> Steps:
        """Returns the steps that are known by now."""
        for line in self._tail.lines():
            self._lines += bool(line.strip())
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                self._keys |= dict.fromkeys(str(key) for key in row)
                self._note({str(key): value for key, value in row.items()})
        return self._reports.steps(problem=self._problem())

    def close(self) -> None:
        """Does nothing: no file is open between two reads."""

    def _note(self, row: dict[str, Any]) -> None:
        key = self._key
        if not key:
            key = next((name for name in row if _KEYS.fullmatch(_last(name))), "")
        losses = (row[name] for name in row if _last(name) in _LOSS_KEYS)
        if key in row:
            self._reports.add(seconds_of(key, row[key]), _number(next(losses, None)))

    def _problem(self) -> tuple[str, str]:
        try:
            check_regular(self._path)
        except Unreadable as error:
            return error.message, "let the command write its step times to a regular file"
        if not self._path.exists():
            what = f"the command did not write `{self._path}`"
            return what, "check the path: it is relative to the working directory"
        if not self._lines:
            return f"the command wrote no whole line to `{self._path}`", ""
        if not self._keys:
            return f"`{self._path}` has lines, but none is a JSON object", ""
        keys = ", ".join(list(self._keys)[:12])
        if self._key and self._key not in self._keys:
            meant = did_you_mean(self._key, self._keys)
            return f"no line of `{self._path}` has the key `{self._key}`{meant}", f"keys: {keys}"
        if self._key:
            return f"`{self._key}` in `{self._path}` is never a number above zero", ""
        what = f"no line of `{self._path}` has a key that is known for step times"
        return what, f"name it: `jsonl:FILE:KEY`; keys: {keys}"


class PrintedReader:
    """Reads `Printed` from the log of a run."""

    def __init__(self, log: Path, source: Printed, *, skip: int, steps: int) -> None:
        self._tail = Tail(log, from_end=True)
        self._pattern = source.pattern
        self._matcher = LineMatcher(source.pattern)
        self._reports = _Reports(skip=skip, steps=steps)

    def read(self) -> Steps:
        """Returns the steps that are known by now.

        Raises:
          UsageError: the pattern takes too long.
        """
        for named, unnamed in self._matcher.find(self._tail.lines()):
            self._note(named, unnamed)
        what = f"no line that the command printed matches `{self._pattern}`"
        if self._reports.bad:
            what = f"`{self._pattern}` matches, but never with a number above zero"
        return self._reports.steps(problem=(what, ""))

    def close(self) -> None:
        """Ends the process that searches for the pattern."""
        self._matcher.close()

    def _note(self, named: dict[str, str | None], unnamed: str | None) -> None:
        loss = _number(named.pop("loss", None))
        name = next((name for name in _GROUPS if named.get(name)), "s")
        self._reports.add(seconds_of(name, named.get(name) or unnamed), loss)


class CaptureReader:
    """Reads what the timers of a run's processes have written, see `program/step_timer`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._timers: dict[Path, _TimerLog] = {}

    def read(self) -> Steps:
        """Returns the steps that are known by now, from the process with the largest step."""
        for path in sorted(self._folder.glob("*.jsonl")):
            tail = self._tails.setdefault(path, Tail(path))
            timer = self._timers.setdefault(path, _TimerLog())
            for line in tail.lines():
                timer.read(line)
        timers = sorted(self._timers.values(), key=lambda one: one.rank)
        return timers[-1].steps() if timers else Steps(problem=_NO_JAX)

    def close(self) -> None:
        """Does nothing: no file is open between two reads."""


Reader = JsonReader | PrintedReader | CaptureReader


_NO_JAX = (
    "no Python of the command has imported jax",
    "capture needs a Python that reads PYTHONPATH (not `python -I` or `-E`); or read what the "
    "command writes: --step-time jsonl:FILE or regex:PATTERN",
)
_NO_STEP = (
    "no jitted function was called three times with arguments of the same shapes",
    "let it run for more steps, or read what the command writes: --step-time jsonl:FILE or "
    "regex:PATTERN",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JaxLine:
    kind: Literal["jax"]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepLine:
    kind: Literal["step"]
    name: str
    file: str = ""
    line: int = 0
    argument_bytes: int = 0
    devices: int = 0

    def step(self) -> SeenStep:
        return SeenStep(
            name=self.name,
            file=self.file,
            line=self.line,
            argument_bytes=self.argument_bytes,
            devices=self.devices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossesLine:
    kind: Literal["losses"]
    values: tuple[float, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleLine:
    kind: Literal["sample"]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    steps: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ErrorLine:
    kind: Literal["error"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _DoneLine:
    kind: Literal["done"]


_TimerLine = _JaxLine | _StepLine | _LossesLine | _SampleLine | _ErrorLine | _DoneLine


class _TimerLog:
    """The lines that the timer of one process has written."""

    def __init__(self) -> None:
        self._step: SeenStep | None = None
        self._samples_s: list[float] = []
        self._seen = 0
        self._losses: tuple[float, ...] = ()
        self._dtype = TEXT_DTYPE
        self._is_done = False
        self._error = ""
        self._damage = ""

    @property
    def rank(self) -> tuple[bool, int]:
        """A key by which logs are compared; the most informative log has the largest."""
        return self._is_done, -1 if self._step is None else self._step.argument_bytes

    def read(self, text: str) -> None:
        """Reads a line. A line that no timer has written is ignored, and the first such line is
        reported."""
        try:
            self._note(read_json(text, _TimerLine))
        except AutomeshError as error:
            self._damage = self._damage or error.message

    def _note(self, line: _TimerLine) -> None:
        match line:
            case _StepLine():
                self._samples_s, self._losses = [], ()
                self._step = line.step()
            case _LossesLine():
                self._losses, self._dtype = line.values, coarsest(line.dtypes)
            case _SampleLine():
                self._samples_s.append(line.seconds)
                self._seen += line.steps
            case _ErrorLine():
                self._error = line.text
            case _DoneLine():
                self._is_done = True
            case _JaxLine():
                return

    def steps(self) -> Steps:
        problem = (f"the timer failed: {self._error}", "") if self._error else _NO_STEP
        if self._damage and not self._error:
            problem = (f"a line that the timer wrote is damaged: {self._damage}", _NO_STEP[1])
        if self._step is not None and not self._error:
            problem = (f"{self._step} was called, but not often enough to be timed", _NO_STEP[1])
        return Steps(
            samples_s=tuple(self._samples_s),
            seen=self._seen,
            losses=self._losses,
            loss_dtype=self._dtype,
            is_enough=self._is_done,
            step=self._step,
            problem=problem,
        )


class _Reports:
    """Step times that the command itself reports, one in each report."""

    def __init__(self, *, skip: int, steps: int) -> None:
        self._skip = skip
        self._steps = steps
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self.bad = 0

    def add(self, seconds: float | None, loss: float | None) -> None:
        if seconds is None:
            self.bad += 1
            return
        self._seconds.append(seconds)
        if loss is not None and len(self._losses) < LOSSES:
            self._losses.append(loss)

    def steps(self, *, problem: tuple[str, str]) -> Steps:
        counted = tuple(self._seconds[self._skip :])
        if self._seconds:
            what = f"only {len(self._seconds)} step times were found, and the first {self._skip} "
            problem = (what + "are skipped", "let it run for more steps, or lower --skip-steps")
        return replace(
            Steps(problem=problem),
            samples_s=counted,
            seen=len(self._seconds),
            losses=tuple(self._losses),
            is_enough=enough(counted, self._steps),
        )


def seconds_of(name: str, value: object) -> float | None:
    """Returns the seconds of a step, by the name of the figure; None for a value that is no number
    above zero.

    >>> seconds_of("step_time_ms", 250), seconds_of("perf/steps_per_s", "4"), seconds_of("s", "x")
    (0.25, 0.25, None)
    """
    number = _number(value)
    if number is None or not 0 < number < math.inf:
        return None
    last, seconds = _last(name), number
    if _RATE.fullmatch(last):
        seconds = 1 / number
    elif _MILLISECONDS.fullmatch(last):
        seconds = number / 1000
    # The smallest and the largest numbers have no inverse.
    return seconds if 0 < seconds < math.inf else None


def coarsest(dtypes: Sequence[str]) -> str:
    """Returns the float type with the fewest digits; types of less than 16 bits are coarser than
    all others."""
    if not dtypes:
        return "float32"
    return max(dtypes, key=lambda name: _FLOATS.index(name) if name in _FLOATS else len(_FLOATS))


def _last(key: str) -> str:
    return key.rpartition("/")[2].lower()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value.replace(",", "") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
