"""The pattern of step times, which may be one that no engine ends with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from automesh import limits
from automesh.errors import UsageError
from automesh.tuner.command.line_matcher import LineMatcher
from automesh.tuner.command.step_times import Printed, PrintedReader

BACKTRACKS = r"step (?:(\d+)+)+ done"
HOSTILE = "step " + "1" * 40 + "\n"


def helpers() -> list[psutil.Process]:
    """The processes that match, those left out that have ended."""
    found: list[psutil.Process] = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "matching_process.py" in str(one.cmdline()):
                found.append(one)
    return found


def test_groups_are_found_with_and_without_names() -> None:
    matcher = LineMatcher(r"took (?P<ms>[0-9.]+) ms(?:, loss (?P<loss>\S+))?")
    assert matcher.find([]) == []
    assert helpers() == []  # Nothing was to be looked at.
    found = matcher.find(["took 1.5 ms, loss nan", "nothing", "took 2 ms \ud800"])
    assert found == [({"ms": "1.5", "loss": "nan"}, None), ({"ms": "2", "loss": None}, None)]
    assert len(helpers()) == 1
    matcher.close()
    matcher.close()
    assert helpers() == []
    plain = LineMatcher("([0-9.]+) s")
    assert plain.find(["0.25 s"]) == [({}, "0.25")]
    del plain
    assert helpers() == []


def test_a_pattern_that_backtracks_without_end_is_named_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process the first read would take longer than the machine lasts: 2**40 ways."""
    monkeypatch.setattr(limits, "MATCHING_S", 0.3)
    log = tmp_path / "run.log"
    log.write_text("step 1 done\n")
    reader = PrintedReader(log, Printed(pattern=BACKTRACKS), skip=0, steps=3)
    assert reader.read().seen == 1
    with log.open("a") as file:
        file.write(HOSTILE)
    with pytest.raises(
        UsageError, match="takes too long to find in what the command prints"
    ) as error:
        reader.read()
    assert BACKTRACKS in error.value.message
    assert error.value.hint
    assert helpers() == []


def test_a_process_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_S", 0.3)
    matcher = LineMatcher("(a)")
    assert matcher.find(["a"])
    (helper,) = helpers()
    helper.suspend()
    begun = time.monotonic()
    with pytest.raises(UsageError, match="takes too long"):
        matcher.find(["a"])
    assert time.monotonic() - begun < 60
    assert helpers() == []


def test_a_process_that_was_killed_is_told_of() -> None:
    matcher = LineMatcher("(a)")
    assert matcher.find(["a"])
    (helper,) = helpers()
    helper.terminate()
    while helpers():
        time.sleep(0.01)
    with pytest.raises(UsageError, match="ended with code -15"):
        matcher.find(["a"])


def test_of_a_line_without_an_end_the_beginning_counts() -> None:
    matcher = LineMatcher("(a+)")
    ((_, text),) = matcher.find(["a" * (limits.LINE_CHARS + 1)])
    assert text == "a" * limits.LINE_CHARS
    matcher.close()


def test_lines_are_taken_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command may print without a pause: its lines must not be in memory together."""
    monkeypatch.setattr(limits, "MATCHING_LINES", 3)
    matcher = LineMatcher("step ([0-9]+)")
    taken: list[int] = []

    def printed() -> Iterator[str]:
        for number in range(7):
            taken.append(number)
            yield f"step {number}" if number % 2 else "something else"

    assert [text for _, text in matcher.find(printed())] == ["1", "3", "5"]
    assert taken == list(range(7))
    assert matcher.find(iter([])) == []
    matcher.close()


def test_without_a_line_no_process_is_started() -> None:
    assert LineMatcher("(a)").find(iter([])) == []
    assert helpers() == []
