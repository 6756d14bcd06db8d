"""One run of a command: starts it under a guardian, watches it until its steps are timed, and ends
it.

The results of a run are in its folder and its log before this process reads them. So a run that was
complete when the search was killed is not repeated: `recovered` reads its results.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from automesh import limits
from automesh.errors import AutomeshError, UsageError, unwritable
from automesh.files import write_whole
from automesh.jsonio import read_json, to_json
from automesh.outcomes import Failed, Failure, OutOfMemory, TimedOut
from automesh.package import PACKAGE
from automesh.program.lower.memory_text import needed_and_limit
from automesh.reading import Unreadable, read_bytes
from automesh.tuner.command.step_times import (
    FEW,
    SLOW_S,
    CaptureReader,
    CaptureSource,
    JsonLines,
    JsonReader,
    Mark,
    Printed,
    PrintedReader,
    Reader,
    SeenStep,
    Source,
    Steps,
)
from automesh.tuner.command.template import RUN_DIR
from automesh.worker.environment import environment
from automesh.worker.messages import Surroundings
from automesh.worker.process import Ending, Guarded, log_tail, read_ending

RUN_VARIABLE = "AUTOMESH_RUN"
_TIMER_VARIABLE = "AUTOMESH_STEP_TIMER"  # also in program/step_timer/sitecustomize.py
_TIMER = PACKAGE / "program" / "step_timer"
_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_LOOK_S = 0.1
_PULSE_S = 2.0
_KILL_LIMIT_S = 1.5  # The guardian needs milliseconds, its deputy half a second.
_REASON_CHARS = 160
_MEND = "mend it and run the same command again; what is finished is kept"
_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY|^MemoryError|std::bad_alloc", re.MULTILINE
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Iteration)\b(:.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The settings that all runs of a search share.

    Attributes:
      program: the path of the program; the first word of the command is only its name.
      surroundings: the environment of the command.
      source: the source of the step times.
      skip: number of first steps that do not count.
      steps: number of steps that count; a run is ended after them.
      timeout_s: the most seconds that a run may take.
      memory_limit_bytes: the limit for the command and all processes that it starts, together.
      cache_dir: the folder in which jax keeps compiled programs for later runs.
    """

    program: str
    surroundings: Surroundings
    source: Source
    skip: int
    steps: int
    timeout_s: float
    memory_limit_bytes: int
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a run's files.

    Attributes:
      logs: the folder of the study's logs.
      name: the name of the run, such as `run-0007`; each attempt has another one.
    """

    logs: Path
    name: str

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    @property
    def folder(self) -> Path:
        """The folder of the run, which is removed after the run."""
        return self.logs / self.name

    @property
    def run_dir(self) -> Path:
        """The value of `{run_dir}`."""
        return self.folder / "files"

    @property
    def steps(self) -> Path:
        """The folder in which timers write."""
        return self.folder / "steps"

    @property
    def mark(self) -> Path:
        """The file with the length of a file of JSON lines before the run."""
        return self.folder / "mark.json"

    @property
    def ending(self) -> Path:
        """The file that records how the command ended, if it ended by itself."""
        return self.folder / "ended.json"

    def clear(self) -> None:
        """Removes all files except the log."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run whose steps were timed.

    Attributes:
      samples_s: seconds per step.
      losses: losses of the first steps, as far as the source has them.
      step: the step that was timed; None unless it was captured.
    """

    samples_s: tuple[float, ...]
    losses: tuple[float, ...]
    loss_dtype: str
    step: SeenStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A run that ended well, but showed no step; all other runs would do the same.

    Attributes:
      reason: one sentence, as in `Failed`.
    """

    reason: str
    hint: str
    log: Path


RunResult = FinishedRun | Unseen | Failure


def run(
    manner: Manner,
    place: Place,
    words: tuple[str, ...],
    *,
    clock: Callable[[], float],
    pulse: Callable[[], None],
    on_steps: Callable[[int], None],
) -> RunResult:
    """Runs a command until its steps are timed, it ends, or its time is over.

    When this returns or raises, nothing of the command is left.

    Args:
      clock: monotonic seconds.
      pulse: called every two seconds; an exception from it ends the run.
      on_steps: called with the steps so far, whenever there are more.

    Raises:
      UsageError: the folder of the run cannot be written, the system refuses to start a process, or
        the pattern of step times takes too long.
    """
    try:
        reader, variables = _prepare(manner, place)
    except OSError as error:
        raise unwritable(place.folder, error, hint=_MEND) from None
    with closing(reader):
        process = _start(manner, place, words, variables)
        watch = _Watch(process=process, reader=reader, clock=clock, pulse=pulse, on_steps=on_steps)
        late = False
        try:
            late = watch.until(clock() + manner.timeout_s)
        finally:
            ending = _end(process)
        steps = reader.read()
    if late and not steps.samples_s:
        return TimedOut(stage="run", limit_s=manner.timeout_s, log_tail=log_tail(place.log))
    # A process that was killed for its steps or its time has no exit code of its own.
    return _result(manner, place, steps, ending, was_stopped=late or steps.is_enough)


def _start(
    manner: Manner, place: Place, words: tuple[str, ...], variables: dict[str, str]
) -> Guarded:
    try:
        return Guarded(
            [manner.program, *words[1:]],
            variables=variables,
            log=place.log,
            memory_limit_bytes=manner.memory_limit_bytes,
            report=place.ending,
        )
    except OSError as error:
        raise UsageError(
            f"the command could not be started: {(error.strerror or str(error)).lower()}",
            hint=_MEND,
        ) from None


def recovered(manner: Manner, place: Place) -> RunResult | None:
    """Returns the result of a run that had ended when the search was killed; None if it had not
    ended."""
    if not place.folder.is_dir():
        return None
    mark = _read_mark(place)
    if mark is None and isinstance(manner.source, JsonLines):
        return None  # It is not known which lines of the file belong to this run.
    with closing(_reader(manner, place, mark or Mark())) as reader:
        steps = reader.read()
    ending = _read_ending(place)
    if steps.is_enough:
        return _result(manner, place, steps, ending or Ending(code=None), was_stopped=True)
    return None if ending is None else _result(manner, place, steps, ending, was_stopped=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    process: Guarded
    reader: Reader
    clock: Callable[[], float]
    pulse: Callable[[], None]
    on_steps: Callable[[int], None]

    def until(self, deadline_s: float) -> bool:
        """Waits until there are enough steps or the command has ended; returns True if it is too
        late."""
        seen, next_pulse_s = 0, self.clock() + _PULSE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.leash, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK_S) and self.process.has_ended():
                    return False
                steps = self.reader.read()
                if steps.seen > seen:
                    seen = steps.seen
                    self.on_steps(seen)
                if steps.is_enough:
                    return False
                now_s = self.clock()
                if now_s >= deadline_s:
                    return True
                if now_s >= next_pulse_s:
                    next_pulse_s = now_s + _PULSE_S
                    self.pulse()


def _end(process: Guarded) -> Ending:
    """Kills the command and all processes that it has started."""
    process.kill()
    with selectors.DefaultSelector() as selector:
        selector.register(process.leash, selectors.EVENT_READ)
        for _ in range(2):
            for _ in range(int(_KILL_LIMIT_S / _LOOK_S)):
                if selector.select(_LOOK_S) and process.has_ended():
                    return process.collect_ending()
            # The deputy is stopped or stuck: then the guardian does all the killing.
            process.kill_deputy()
    return process.collect_ending()


def _prepare(manner: Manner, place: Place) -> tuple[Reader, dict[str, str]]:
    place.clear()
    place.run_dir.mkdir(parents=True)
    place.steps.mkdir()
    mark = Mark()
    if isinstance(manner.source, JsonLines):
        mark = Mark.of(_json_file(manner.source, place))
    write_whole(place.mark, json.dumps(to_json(mark, Mark)), lasting=False)
    variables = environment(os.environ, manner.surroundings)
    variables[RUN_VARIABLE] = place.name
    variables.setdefault(_CACHE_VARIABLE, str(manner.cache_dir))
    if isinstance(manner.source, CaptureSource):
        options = {
            "folder": str(place.steps),
            "skip": manner.skip,
            "steps": manner.steps,
            "slow_s": SLOW_S,
            "few": FEW,
        }
        variables[_TIMER_VARIABLE] = json.dumps(options)
        before = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join([str(_TIMER), *([before] if before else [])])
    return _reader(manner, place, mark), variables


def _reader(manner: Manner, place: Place, mark: Mark) -> Reader:
    match manner.source:
        case CaptureSource():
            return CaptureReader(place.steps)
        case JsonLines() as source:
            file = _json_file(source, place)
            return JsonReader(file, source, mark, skip=manner.skip, steps=manner.steps)
        case Printed() as source:
            return PrintedReader(place.log, source, skip=manner.skip, steps=manner.steps)


def _json_file(source: JsonLines, place: Place) -> Path:
    return Path(source.file.replace(f"{{{RUN_DIR}}}", str(place.run_dir)))


def _read_mark(place: Place) -> Mark | None:
    try:
        return read_json(read_bytes(place.mark, limit_bytes=limits.SMALL_RECORD_BYTES), Mark)
    except AutomeshError:  # The file was never written, or a power cut has damaged it.
        return None


def _read_ending(place: Place) -> Ending | None:
    try:
        return read_ending(read_bytes(place.ending, limit_bytes=limits.SMALL_RECORD_BYTES))
    except Unreadable:
        return None


def _result(
    manner: Manner, place: Place, steps: Steps, ending: Ending, *, was_stopped: bool
) -> RunResult:
    ended_badly = ending.over_limit or ending.kernel_killed or ending.code != 0
    if ended_badly and not was_stopped:
        return _failure(manner, place, ending)
    if steps.samples_s:
        return FinishedRun(
            samples_s=steps.samples_s,
            losses=steps.losses,
            loss_dtype=steps.loss_dtype,
            step=steps.step,
        )
    reason, hint = steps.problem
    return Unseen(reason=reason, hint=hint, log=place.log)


def _failure(manner: Manner, place: Place, ending: Ending) -> Failure:
    tail = log_tail(place.log)
    if ending.over_limit or ending.kernel_killed:
        failure = ending.outcome(stage="run", memory_limit_bytes=manner.memory_limit_bytes)
        assert isinstance(failure, OutOfMemory)
        return replace(failure, detail=f"{failure.detail} ({_where(place)})")
    reason = _last_words(tail)
    if _OUT_OF_MEMORY.search(tail):
        needed, limit = needed_and_limit(tail)
        said = next(
            (line for line in tail.splitlines() if _OUT_OF_MEMORY.search(line)),
            reason,
        )
        detail = f"{said.strip()[:_REASON_CHARS]} ({_where(place)})"
        return OutOfMemory(stage="run", needed_bytes=needed, limit_bytes=limit, detail=detail)
    how = "was lost" if ending.code is None else f"exit code {ending.code}"
    if ending.code is not None and ending.code < 0:
        how = f"killed by signal {-ending.code}"
    return Failed(
        stage="run",
        reason=f"{how} ({_where(place)})" + (f": {reason}" if reason else ""),
        log_tail=tail,
    )


def _where(place: Place) -> str:
    return f"{place.logs.name}/{place.log.name}"


def _last_words(tail: str) -> str:
    """Returns the most informative line: the last one with an exception, else the last one."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    said = (raised or lines or [""])[-1]
    return said if len(said) <= _REASON_CHARS else said[: _REASON_CHARS - 3] + "..."
