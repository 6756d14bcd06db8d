"""The live display of a search on a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from automesh.report.phases import Clock, State, left_text, with_phase
from automesh.report.words import clean
from automesh.units import format_wait

_NAME_WIDTH = 9


def frame(state: State, *, now_s: float, width: int) -> RenderableType:
    """One picture of the display: a bar per phase, then the time, the current and the best plan."""
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
    elapsed = format_wait(now_s - state.started_s)
    texts = {
        "time": f"{elapsed} elapsed",
        "now": state.doing or state.now,
        "last": state.now if state.doing else "",
        "best": state.best,
    }
    for label, text in texts.items():
        if text:
            lines.add_row(Text(label, style="bold"), Text(text))
    return Group(bars, lines)


class LiveProgress:
    """Redraws four times a second; notices scroll away above it.

    Args:
      console: of the terminal; it decides about colour (NO_COLOR) and width.
      clock: monotonic seconds.
    """

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._state = State(started_s=clock())
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
        return frame(self._state, now_s=self._clock(), width=self._console.width)

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

    def now(self, text: str) -> None:
        """See `Progress.now`."""
        self._state = replace(self._state, now=clean(text), doing="")

    def best(self, text: str) -> None:
        """See `Progress.best`."""
        self._state = replace(self._state, best=clean(text))

    def notice(self, text: str) -> None:
        """See `Progress.notice`."""
        self._console.print(Text(f"note: {clean(text)}", overflow="fold"))

    def log(self, text: str) -> None:
        """See `Progress.log`."""
        self._console.print(Text(clean(text), style="dim", overflow="fold"))

    def tick(self, doing: str = "") -> None:
        """See `Progress.tick`; the display draws itself."""
        if doing:
            self._state = replace(self._state, doing=clean(doing))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = replace(self._state, now="", doing="")
        self._live.stop()
