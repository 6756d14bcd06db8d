"""What a search says while it runs: the interface, and who prints it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console

from automesh.report.live import LiveProgress
from automesh.report.phases import Clock, State, phase_text, with_phase
from automesh.report.words import clean
from automesh.units import format_wait

_LINE_EVERY_S = 5.0
_SIGN_OF_LIFE_S, _LONGEST_SILENCE_S = 2.0, 60.0


class Progress(Protocol):
    """Where a search reports to; nothing that it is told may change the search."""

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        """Starts a phase or tells how far it is; phases stand in the order of their first reports.

        Args:
          name: one word: enumerate, compile, measure, confirm.
          total: what there is to do; may change.
          done: what is done, work of an earlier run included.
          note: what is worth knowing beside the count, e.g. `2 failed`.
          took_s: seconds that the trial just finished took; 0 if none was.
          lanes: how many trials run at the same time.
        """
        ...

    def now(self, text: str) -> None:
        """What is being worked on; empty for nothing."""
        ...

    def best(self, text: str) -> None:
        """The best plan so far, with what its figure rests on."""
        ...

    def notice(self, text: str) -> None:
        """What the user should know, one sentence."""
        ...

    def log(self, text: str) -> None:
        """A line for the record, such as where a worker's log is."""
        ...

    def tick(self, doing: str = "") -> None:
        """Call it at least every second of waiting: a long wait then shows signs of life.

        Args:
          doing: what the workers do at this moment; empty if nothing is known of them.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class PlainProgress:
    """Whole lines on a stream that is no terminal.

    A line for the start and the end of each phase, for finished trials at most every five seconds,
    and for every notice. Between them lines that begin with `...` say what is being done: the first
    at once, then one after two seconds without any other line, later after longer ones (a
    twentieth of the time that has passed, a minute at most).

    Args:
      stream: where to, usually stderr.
      clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._state = State(started_s=clock())
        self._printed_s = -math.inf

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        """See `Progress.phase`."""
        now_s = self._clock()
        before = next((one for one in self._state.phases if one.name == name), None)
        self._state = with_phase(
            self._state,
            name,
            total=total,
            done=done,
            note=note,
            took_s=took_s,
            lanes=lanes,
            now_s=now_s,
        )
        phase = next(one for one in self._state.phases if one.name == name)
        is_edge = before is None or (phase.is_finished and not before.is_finished)
        has_news = before is not None and phase.done != before.done
        if is_edge or (has_news and now_s - self._printed_s >= _LINE_EVERY_S):
            self._print(phase_text(phase, self._state, now_s))

    def now(self, text: str) -> None:
        """See `Progress.now`."""
        self._state = replace(self._state, now=clean(text), doing="")
        self.tick()

    def best(self, text: str) -> None:
        """See `Progress.best`; said with the next line of the phase."""
        self._state = replace(self._state, best=clean(text))

    def notice(self, text: str) -> None:
        """See `Progress.notice`."""
        self._print(f"note: {clean(text)}")

    def log(self, text: str) -> None:
        """See `Progress.log`."""
        self._print(clean(text))

    def tick(self, doing: str = "") -> None:
        """See `Progress.tick`."""
        if doing:
            self._state = replace(self._state, doing=clean(doing))
        now_s = self._clock()
        elapsed_s = now_s - self._state.started_s
        patience_s = min(max(_SIGN_OF_LIFE_S, elapsed_s / 20), _LONGEST_SILENCE_S)
        if now_s - self._printed_s < patience_s:
            return
        running = [phase for phase in self._state.phases if not phase.is_finished]
        parts = [self._state.doing or self._state.now]
        parts += [phase_text(one, self._state, now_s) for one in running[-1:]]
        if any(parts):
            said = ", ".join(part for part in parts if part)
            self._print(f"... {said}, {format_wait(elapsed_s)} elapsed")

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._printed_s = self._clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.flush()


class Silent:
    """Says nothing: for a search that is called from Python."""

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        """See `Progress.phase`."""

    def now(self, text: str) -> None:
        """See `Progress.now`."""

    def best(self, text: str) -> None:
        """See `Progress.best`."""

    def notice(self, text: str) -> None:
        """See `Progress.notice`."""

    def log(self, text: str) -> None:
        """See `Progress.log`."""

    def tick(self, doing: str = "") -> None:
        """See `Progress.tick`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_progress(stream: TextIO, *, clock: Clock = time.monotonic) -> Progress:
    """A live display if `stream` is a terminal that can redraw, else plain lines.

    Returns:
      A context manager: enter it before the first report, leave it before the result is printed.
    """
    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, clock=clock)
    return PlainProgress(stream, clock=clock)
