"""The progress of a search: remaining time, plain lines, and a live display that nothing tears."""

import dataclasses
import doctest
import itertools
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from automesh.report import progress
from automesh.report.progress import (
    DisplayState,
    LiveProgress,
    PlainProgress,
    Silent,
    frame,
    left_text,
    open_progress,
    remaining_s,
    with_phase,
)
from automesh.report.so_far import SoFar
from tests.support.cases.results_golden import Clock, running_state
from tests.support.samples import results_samples


def test_documented_examples() -> None:
    outcome = doctest.testmod(progress)
    assert outcome.attempted and not outcome.failed


def test_one_slow_compile_does_not_spoil_the_estimate() -> None:
    assert remaining_s([2.0, 2.0, 2.0, 600.0, 2.0], 10, lanes=1) == 20.0


def test_the_last_trial_takes_a_whole_turn_on_many_lanes() -> None:
    assert remaining_s([8.0], 1, lanes=4) == 8.0
    assert remaining_s([8.0], 5, lanes=4) == 16.0


@given(
    durations=st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=30),
    left=st.integers(0, 1000),
    lanes=st.integers(1, 8),
)
def test_remaining_time_is_between_the_extremes(
    durations: list[float], left: int, lanes: int
) -> None:
    turns = -(-left // lanes)
    assert turns * min(durations) <= remaining_s(durations, left, lanes=lanes)
    assert remaining_s(durations, left, lanes=lanes) <= turns * max(durations)


def report(state: DisplayState, done: int, *, now_s: float, took_s: float = 0.0) -> DisplayState:
    return with_phase(
        state, "compile", total=10, done=done, note="", took_s=took_s, lanes=1, now_s=now_s
    )


def test_work_of_an_earlier_run_does_not_count_as_speed() -> None:
    state = report(DisplayState(started_s=0.0), 6, now_s=0.0)
    assert state.phases[0].left_s(5.0) is None  # nothing done in this run: nothing is known
    state = report(state, 7, now_s=10.0)
    assert state.phases[0].left_s(10.0) == 30.0  # one in 10 s, three to go


def test_remaining_time_runs_down_between_reports_and_admits_delay() -> None:
    state = report(DisplayState(started_s=0.0), 0, now_s=0.0)
    state = report(state, 9, now_s=90.0, took_s=10.0)
    assert left_text(state.phases[0], 94.0) == "about 6 s left"
    assert left_text(state.phases[0], 120.0) == "taking longer than expected"
    state = report(state, 10, now_s=121.0, took_s=31.0)
    assert left_text(state.phases[0], 121.0) == ""


def test_only_recent_durations_count() -> None:
    state = DisplayState(started_s=0.0)
    for done in range(40):
        took_s = 100.0 if done < 20 else 1.0
        state = with_phase(
            state, "compile", total=41, done=done, note="", took_s=took_s, lanes=1, now_s=0.0
        )
    assert state.phases[0].left_s(0.0) == 2.0


def test_plain_lines_are_rare_when_trials_are_short() -> None:
    out, clock = StringIO(), Clock()
    progress = PlainProgress(out, clock=clock)
    for done in range(1001):
        clock.now_s += 0.1
        progress.phase("compile", total=1000, done=done, took_s=0.1)
    lines = out.getvalue().splitlines()
    assert 20 <= len(lines) <= 22  # the start, one every 5 s of 100 s, the end
    assert lines[-1] == "compile 1000/1000"
    assert re.fullmatch(r"compile \d+/1000, about \d+ s left", lines[5])


def test_plain_lines_come_for_every_trial_that_is_long() -> None:
    out, clock = StringIO(), Clock()
    progress = PlainProgress(out, clock=clock)
    for done in range(4):
        progress.phase("compile", total=3, done=done, took_s=20.0 if done else 0.0)
        clock.now_s += 20.0
    assert len(out.getvalue().splitlines()) == 4


def test_a_long_wait_says_at_once_and_every_two_seconds_what_is_done() -> None:
    out, clock = StringIO(), Clock()
    progress, begin = PlainProgress(out, clock=clock), clock.now_s
    progress.now("looking at train.py")
    for _ in range(30):
        clock.now_s += 0.5
        progress.tick("calling build on dp:8" if clock.now_s - begin > 4 else "")
    lines = out.getvalue().splitlines()
    assert lines[0] == "... looking at train.py, 0 s elapsed"
    assert lines[1:3] == [f"... looking at train.py, {s} s elapsed" for s in (2, 4)]
    assert lines[3:] == [f"... calling build on dp:8, {s} s elapsed" for s in (6, 8, 10, 12, 14)]


def test_signs_of_life_get_rarer_and_never_cease() -> None:
    out, clock = StringIO(), Clock()
    progress = PlainProgress(out, clock=clock)
    progress.phase("compile", total=9)
    times: list[float] = []
    for _ in range(7200):
        clock.now_s += 0.5
        before = out.tell()
        progress.tick("compiling dp:8")
        times += [clock.now_s] if out.tell() > before else []
    gaps = [after - one for one, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 2.0
    assert gaps[-1] == 60.0
    assert "... compiling dp:8, compile 0/9, 59 min 42 s elapsed" in out.getvalue()


def test_the_display_shows_what_the_workers_do_beside_what_was_found_last() -> None:
    state = DisplayState(started_s=0.0, now="dp:8, 12.3 ms", doing="running fsdp:8")
    out = StringIO()
    Console(file=out, width=80, _environ={}).print(frame(state, now_s=0.0, width=80))
    lines = [line.split(maxsplit=1) for line in out.getvalue().splitlines() if line.strip()]
    assert ["now", "running fsdp:8"] in [[word, rest.strip()] for word, rest in lines]
    assert ["last", "dp:8, 12.3 ms"] in [[word, rest.strip()] for word, rest in lines]


def test_plain_lines_hold_no_escape_codes_or_line_ends() -> None:
    out = StringIO()
    with PlainProgress(out, clock=Clock()) as progress:
        progress.notice("a\x1b[31mb\nc")
        progress.log("d\re")
    assert out.getvalue() == "note: ab c\nd e\n"


@given(width=st.integers(40, 200))
def test_a_frame_fits_every_width(width: int) -> None:
    out = StringIO()
    Console(file=out, width=width, _environ={}).print(
        frame(running_state(), now_s=1040.0, width=width)
    )
    assert all(cell_len(line) <= width for line in out.getvalue().splitlines())
    assert "…" not in out.getvalue()
    assert " 30/120 " in out.getvalue()


def test_a_phase_with_nothing_to_do_is_drawn() -> None:
    state = with_phase(
        DisplayState(started_s=0.0),
        "measure",
        total=0,
        done=0,
        note="",
        took_s=0,
        lanes=1,
        now_s=0.0,
    )
    out = StringIO()
    Console(file=out, width=80, _environ={}).print(frame(state, now_s=0.0, width=80))
    assert "0/0" in out.getvalue()


class Screen:
    """As much of a terminal as a live display uses: it keeps what a reader would see at the end."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = 0
        self.column = 0

    def feed(self, text: str) -> "Screen":
        for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.", text, re.DOTALL):
            if piece == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif piece == "\r":
                self.column = 0
            elif piece == "\x1b[2K":
                self.rows[self.row] = ""
            elif piece.startswith("\x1b[") and piece.endswith("A"):
                self.row -= int(piece[2:-1] or 1)
                assert self.row >= 0
            elif piece.startswith("\x1b["):
                assert piece.endswith("m") or piece in ("\x1b[?25l", "\x1b[?25h"), piece
            else:
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + piece + row[self.column + 1 :]
                self.column += 1
        return self


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[object, list[str]]]:
    """A stream to a pseudo terminal, and what has arrived at its other end once it is closed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    ours, theirs = os.openpty()
    chunks: list[bytes] = []
    seen: list[str] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # the other end was closed
            pass
        seen.append(b"".join(chunks).decode().replace("\r\n", "\n"))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:

        def close() -> str:
            stream.close()
            reader.join(10)
            return seen[0]

        yield stream, close
    reader.join(10)
    os.close(ours)


def search(stream: object) -> None:
    with open_progress(stream, clock=Clock()) as progress:
        progress.phase("compile", total=2)
        for done in (1, 2):
            progress.now(f"plan {done}")
            progress.phase("compile", total=2, done=done, took_s=1.0)
            progress.notice(f"plan {done} is odd")
            print(f"a library writes {done}", file=sys.stderr)
        progress.best("dp:8 12.3 ms")
        progress.log("the end")


def test_nothing_tears_the_live_display(terminal: tuple[object, object]) -> None:
    stream, close = terminal
    search(stream)
    written = close()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is back
    rows = [row.rstrip() for row in Screen().feed(written).rows]
    assert rows == [
        "note: plan 1 is odd",
        "a library writes 1",
        "note: plan 2 is odd",
        "a library writes 2",
        "the end",
        "compile   ━━━━━━━━━━━━━━━━━━━━ 2/2",
        "time      0 s elapsed",
        "best      dp:8 12.3 ms",
        "",
    ]


def test_no_color_is_respected(
    terminal: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream, close = terminal
    search(stream)
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", close()))
    assert not {code for code in codes if re.search(r"(^|;)(3|9)\d", code)}


def test_colour_is_used_where_it_may_be(terminal: tuple[object, object]) -> None:
    stream, close = terminal
    search(stream)
    assert re.search(r"\x1b\[3\dm", close())


def test_the_display_is_gone_when_the_search_fails(terminal: tuple[object, object]) -> None:
    stream, close = terminal
    with pytest.raises(KeyboardInterrupt), open_progress(stream, clock=Clock()) as progress:
        progress.phase("compile", total=2)
        raise KeyboardInterrupt
    assert close().rstrip("\n").endswith("\x1b[?25h")
    # rich tells its threads to end and does not wait for them.
    drawing = [each for each in threading.enumerate() if type(each).__name__ == "_RefreshThread"]
    for thread in drawing:
        thread.join(timeout=30)
    assert not [thread for thread in drawing if thread.is_alive()]


def test_a_pipe_and_a_dumb_terminal_get_plain_lines(
    terminal: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = terminal
    assert isinstance(open_progress(StringIO(), clock=Clock()), PlainProgress)
    assert isinstance(open_progress(stream, clock=Clock()), LiveProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_progress(stream, clock=Clock()), PlainProgress)


def test_silence_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Silent() as progress:
        progress.phase("compile", total=1, done=1)
        progress.now("x")
        progress.best("x")
        progress.notice("x")
        progress.log("x")
        progress.tick()
    assert capfd.readouterr() == ("", "")


def ranked(*plans: str, estimated: int = 4) -> SoFar:
    return SoFar(
        rows=tuple(results_samples.estimated_candidate(plan) for plan in plans),
        estimated=estimated,
        plans=24,
        missing="meshes with tp",
    )


def test_it_is_told_once_that_the_first_ten_are_settled() -> None:
    stream = StringIO()
    progress = PlainProgress(stream)
    for is_settled in (False, True, True):
        progress.ranking(replace(ranked("dp:4"), is_settled=is_settled))
    _, still = stream.getvalue().splitlines()
    assert still == (
        "still first: dp:4, 12.0 ms estimated (4 of 24 plans estimated; meshes with tp: not "
        "estimated yet; the first 10 are settled: none of these can come among them)"
    )
    assert "settled" not in replace(ranked("dp:4"), is_settled=True, missing="").extent


def test_a_plan_that_stays_first_is_told_once() -> None:
    stream = StringIO()
    progress = PlainProgress(stream)
    for plan in ("dp:4", "dp:4", "dp:2"):
        progress.ranking(ranked(plan))
    assert stream.getvalue().splitlines() == [
        "first ranked: dp:4, 12.0 ms estimated (4 of 24 plans estimated; meshes with tp: not "
        "estimated yet)",
        "now first: dp:2, 12.0 ms estimated (4 of 24 plans estimated; meshes with tp: not "
        "estimated yet)",
    ]


def test_on_a_terminal_the_table_is_drawn_anew_and_gone_at_the_end(
    terminal: tuple[object, object],
) -> None:
    stream, close = terminal
    with open_progress(stream, clock=Clock()) as progress:
        progress.phase("estimate", total=7, done=1)
        progress.ranking(ranked("dp:4"))
        progress._live.refresh()  # pyright: ignore
        progress.ranking(ranked("dp:2,fsdp:2", "dp:4", estimated=9))
        progress._live.refresh()  # pyright: ignore
    written = close()
    seen = Screen()
    first, second = written.index("4 of 24 plans"), written.index("9 of 24 plans")
    rows = [row.rstrip() for row in seen.feed(written[: first + 70]).rows]
    assert any(row.startswith("mesh  step time *") for row in rows)
    assert any(row.startswith("dp:4 ") and "12.0 ms" in row for row in rows)
    rows = [row.rstrip() for row in seen.feed(written[first + 70 : second + 70]).rows]
    places = [n for n, row in enumerate(rows) if row.startswith(("dp:2,fsdp:2", "dp:4"))]
    assert len(places) == 2 and rows[places[0]].startswith("dp:2,fsdp:2")
    rows = Screen().feed(written).rows
    assert not any("24 plans" in row or "step time" in row for row in rows)


@given(width=st.integers(40, 200), height=st.integers(5, 60))
def test_a_table_of_estimates_fits_every_terminal(width: int, height: int) -> None:
    rows = ranked(*(f"dp:{2**n},fsdp:4,tp:{2**n}" for n in range(1, 11)))
    state = dataclasses.replace(running_state(), best="", so_far=rows)
    out = StringIO()
    console = Console(file=out, width=width, _environ={})
    console.print(frame(state, now_s=1040.0, width=width, height=height))
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert width < 80 or height < 14 or len(lines) <= height
    assert "dp:2,fsdp:4" in out.getvalue() and "not estimated yet" in " ".join(lines)


def test_better_evidence_takes_the_place_of_the_table() -> None:
    progress = PlainProgress(StringIO(), clock=Clock())
    progress.ranking(ranked("dp:4"))
    assert progress._state.so_far is not None  # pyright: ignore
    progress.best("dp:4, 11 ms predicted")
    assert progress._state.so_far is None  # pyright: ignore
