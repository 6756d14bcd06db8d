"""The display of a search while it runs: its interface, its progress as data, and what prints
it."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from automesh.report.so_far import SoFar, drawn
from automesh.texts.streams import taking_all
from automesh.texts.terminal import clean
from automesh.units import format_elapsed, format_wait

Clock = Callable[[], float]
_RECENT = 20
_LINE_EVERY_S = 5.0
_SIGN_OF_LIFE_S, _LONGEST_SILENCE_S = 2.0, 60.0
_NAME_WIDTH = 9
_FEWEST_ROWS = 3  # of a table on a low terminal


class Progress(Protocol):
    """A display of how a search goes on; no call of it may change the search.

    A display that inherits from it shows nothing for methods that it does not override.
    """

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
        """Starts a phase or reports how far it is; phases are shown in the order of their first
        reports.

        Args:
          name: one word: enumerate, compile, measure, confirm.
          total: what there is to do; may change.
          done: what is done, work of an earlier run included.
          note: what is worth knowing in addition to the count, e.g. `2 failed`.
          took_s: seconds that the trial just finished took; 0 if none was.
          lanes: how many trials run at the same time.
        """

    def now(self, text: str) -> None:
        """Shows what is being worked on; empty for nothing."""

    def best(self, text: str) -> None:
        """Shows the best plan so far, with the evidence for its figure."""

    def ranking(self, so_far: SoFar) -> None:
        """Shows the table of estimates so far, after each set of active axes."""

    def notice(self, text: str) -> None:
        """Shows a sentence that the user should know."""

    def log(self, text: str) -> None:
        """Shows a line for the record, such as where a worker's log is."""

    def tick(self, doing: str = "") -> None:
        """Shows signs of life during a long wait; a caller that waits calls it at least every
        second.

        Args:
          doing: what the workers do at this moment; empty if nothing is known of them.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the display."""


class Silent(Progress):
    """A display that shows nothing: for a search that is called from Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The progress of one phase.

    Attributes:
      first_done: `done` when this run took it up.
      started_s: clock time of the first report.
      reported_s: clock time of the last one.
      durations_s: of the trials that finished in this run, the last 20.
    """

    name: str
    total: int
    done: int
    note: str
    lanes: int
    first_done: int
    started_s: float
    reported_s: float
    durations_s: tuple[float, ...] = ()

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to do."""
        return self.done >= self.total

    def left_s(self, now_s: float) -> float | None:
        """Returns the seconds until the phase ends: 0 if it is late, None if nothing is known or
        left."""
        left = self.total - self.done
        if self.durations_s:
            expected = remaining_s(self.durations_s, left, lanes=self.lanes)
        elif self.done > self.first_done:
            expected = (self.reported_s - self.started_s) / (self.done - self.first_done) * left
        else:
            return None
        return max(expected - (now_s - self.reported_s), 0.0) if left > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayState:
    """All that a display shows; replaced as a whole, so no drawing thread sees half a change.

    Attributes:
      now: what the search is at, or found last.
      doing: what its workers do at this moment.
      so_far: the ranking while estimates are made; None before, and once there is better evidence.
    """

    started_s: float
    phases: tuple[Phase, ...] = ()
    now: str = ""
    doing: str = ""
    best: str = ""
    so_far: SoFar | None = None


def remaining_s(durations_s: Sequence[float], left: int, *, lanes: int) -> float:
    """Returns the seconds until `left` trials are done, by the median: one may be very slow.

    >>> remaining_s([2.0, 2.0, 60.0], left=5, lanes=2)
    6.0
    """
    rounds = math.ceil(max(left, 0) / max(lanes, 1))
    return rounds * statistics.median(durations_s)


def with_phase(
    state: DisplayState,
    name: str,
    *,
    total: int,
    done: int,
    note: str,
    took_s: float,
    lanes: int,
    now_s: float,
) -> DisplayState:
    """Returns the state after a report on a phase."""
    known = next((phase for phase in state.phases if phase.name == name), None)
    if known is None:
        known = Phase(
            name=name,
            total=total,
            done=done,
            note="",
            lanes=lanes,
            first_done=done,
            started_s=now_s,
            reported_s=now_s,
        )
        state = replace(state, phases=(*state.phases, known))
    recent = (*known.durations_s, took_s) if took_s > 0 else known.durations_s
    changed = replace(
        known,
        total=total,
        done=done,
        note=clean(note),
        lanes=lanes,
        reported_s=now_s,
        durations_s=recent[-_RECENT:],
    )
    phases = tuple(changed if phase.name == name else phase for phase in state.phases)
    return replace(state, phases=phases)


def left_text(phase: Phase, now_s: float) -> str:
    """Returns `about 2 min left`; empty if nothing is known or left."""
    left = phase.left_s(now_s)
    if left is None:
        return ""
    return f"about {format_wait(left)} left" if left > 0 else "taking longer than expected"


def phase_text(phase: Phase, state: DisplayState, now_s: float) -> str:
    """Returns one line: `compile 31/120, 2 failed, about 2 min left, best dp:8 12.3 ms`."""
    parts = [f"{phase.name} {phase.done}/{phase.total}", phase.note, left_text(phase, now_s)]
    if state.best:
        parts.append(f"best {state.best}")
    return ", ".join(part for part in parts if part)


class _Display(Progress):
    """The part that all displays share: the progress of the search as of the last report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = DisplayState(started_s=clock())

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
        before = self._phase(name)
        self._state = with_phase(
            self._state,
            name,
            total=total,
            done=done,
            note=note,
            took_s=took_s,
            lanes=lanes,
            now_s=self._clock(),
        )
        phase = self._phase(name)
        assert phase is not None
        self._show(before, phase)

    def _phase(self, name: str) -> Phase | None:
        return next((phase for phase in self._state.phases if phase.name == name), None)

    def _show(self, before: Phase | None, phase: Phase) -> None:
        """Shows a phase after a report on it; `before` is what was known of it before."""

    def now(self, text: str) -> None:
        self._state = replace(self._state, now=clean(text), doing="")
        self.tick()

    def best(self, text: str) -> None:
        self._state = replace(self._state, best=clean(text), so_far=None)

    def ranking(self, so_far: SoFar) -> None:
        self._state = replace(self._state, so_far=so_far)

    def tick(self, doing: str = "") -> None:
        if doing:
            self._state = replace(self._state, doing=clean(doing))


class PlainProgress(_Display):
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
        super().__init__(clock)
        self._stream = stream
        self._printed_s = -math.inf
        self._leader = ""
        self._is_settled = False

    def _show(self, before: Phase | None, phase: Phase) -> None:
        now_s = self._clock()
        is_edge = before is None or (phase.is_finished and not before.is_finished)
        has_news = before is not None and phase.done != before.done
        if is_edge or (has_news and now_s - self._printed_s >= _LINE_EVERY_S):
            self._print(phase_text(phase, self._state, now_s))

    def ranking(self, so_far: SoFar) -> None:
        super().ranking(so_far)
        # A line for each plan that takes the lead, not for each step that leaves it there.
        if so_far.first != self._leader:
            self._print(f"{'now first' if self._leader else 'first ranked'}: {so_far}")
        elif so_far.is_settled and not self._is_settled:
            self._print(f"still first: {so_far}")
        self._leader, self._is_settled = so_far.first, so_far.is_settled

    def notice(self, text: str) -> None:
        self._print(f"note: {clean(text)}")

    def log(self, text: str) -> None:
        self._print(clean(text))

    def tick(self, doing: str = "") -> None:
        super().tick(doing)
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
            self._print(f"... {said}, {format_elapsed(elapsed_s)} elapsed")

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._printed_s = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.flush()


def frame(state: DisplayState, *, now_s: float, width: int, height: int = 24) -> RenderableType:
    """Draws one picture of the display: a bar per phase, then the time, the current and the best
    plan, or the table of what is estimated so far, with as many rows as the height allows."""
    bar_width = max(6, min(20, width - 56))
    bars = Table.grid(padding=(0, 1, 0, 0))
    bars.add_column(width=_NAME_WIDTH, no_wrap=True)
    bars.add_column(width=bar_width)
    bars.add_column(justify="right", no_wrap=True)
    bars.add_column(overflow="fold")
    for phase in state.phases:
        notes = [phase.note, left_text(phase, now_s)]
        bars.add_row(
            Text(phase.name[:_NAME_WIDTH], style="bold"),
            ProgressBar(
                total=max(phase.total, 1),
                # A phase without anything to do is a finished one.
                completed=phase.done if phase.total else 1,
                width=bar_width,
                style="dim",
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{phase.done}/{phase.total}"),
            Text(", ".join(note for note in notes if note)),
        )
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(width=_NAME_WIDTH, no_wrap=True)
    lines.add_column(overflow="fold")
    elapsed = format_elapsed(now_s - state.started_s)
    texts = {
        "time": f"{elapsed} elapsed",
        "now": state.doing or state.now,
        "last": state.now if state.doing else "",
        "best": state.best,
    }
    for label, text in texts.items():
        if text:
            lines.add_row(Text(label, style="bold"), Text(text))
    if state.so_far is None:
        return Group(bars, lines)
    # Beside the rows: the header and its rule, an empty line, what is missing, two for the cursor.
    taken = len(state.phases) + sum(map(bool, texts.values())) + 7
    rows = max(height - taken, _FEWEST_ROWS)
    return Group(bars, lines, Text(drawn(state.so_far, width=width, rows=rows)))


class LiveProgress(_Display):
    """Redraws four times a second; notices scroll away above it.

    Args:
      console: of the terminal; it decides about colour (NO_COLOR) and width.
      clock: monotonic seconds.
    """

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        # What Python prints meanwhile goes above the display instead of through it; stdout only if
        # it is a terminal too, since a pipe must get what is written to it.
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
            vertical_overflow="crop",
        )

    def _draw(self) -> RenderableType:
        width, height = self._console.size
        return frame(self._state, now_s=self._clock(), width=width, height=height)

    def notice(self, text: str) -> None:
        self._console.print(Text(f"note: {clean(text)}", overflow="fold"))

    def log(self, text: str) -> None:
        self._console.print(Text(clean(text), style="dim", overflow="fold"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The whole table follows, or what the study knows of the part that there is.
        self._state = replace(self._state, now="", doing="", so_far=None)
        self._live.stop()


def open_progress(stream: TextIO, *, clock: Clock = time.monotonic) -> Progress:
    """Returns a live display if `stream` is a terminal that can redraw, else plain lines.

    Returns:
      A context manager: enter it before the first report, leave it before the result is printed.
    """
    stream = taking_all(stream)
    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, clock=clock)
    return PlainProgress(stream, clock=clock)
