"""Step times of a command: read from files and output, however they come in."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from automesh import limits
from automesh.errors import UsageError
from automesh.tuner.command.step_times import (
    CaptureReader,
    CaptureSource,
    JsonLines,
    JsonReader,
    Mark,
    Printed,
    PrintedReader,
    Tail,
    coarsest,
    parse_source,
    seconds_of,
)

SECONDS = st.floats(1e-6, 1e4)
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(
    st.one_of(
        st.just(CaptureSource()),
        st.builds(
            JsonLines,
            file=st.from_regex(r"[a-z_/.]{1,9}\.jsonl", fullmatch=True),
            key=st.from_regex(r"([a-z]+/)?[a-z_]*", fullmatch=True),
        ),
        st.builds(Printed, pattern=st.sampled_from([r"took ([\d.]+)", r"(?P<ms>\d+) ms: ok"])),
    )
)
def test_what_is_printed_is_read_back(source: CaptureSource | JsonLines | Printed) -> None:
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a source of step times"),
        ("capture:x", "is not a source of step times"),
        ("jsonlines:x", "(did you mean `jsonl`?)"),
        ("jsonl:", "names no file"),
        ("jsonl::loss", "names no file"),
        ("jsonl:gs://bucket/m.jsonl", "is not on this machine"),
        ("jsonl:{fsdp}.jsonl", "only {run_dir} can stand in it"),
        ("regex:took (", "is not a regular expression"),
        ("regex:took", "has 0 groups"),
        ("regex:(a) (b)", "has 2 groups"),
        ("regex:(?P<ms>a)(?P<s>b)", "has 2 groups"),
        ("regex:(?P<sec>a)", "has a group `sec`"),
    ],
)
def test_what_is_no_source(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        parse_source(text)
    assert error.value.hint


@pytest.mark.parametrize(
    ("key", "value", "seconds"),
    [
        ("step_time", 0.5, 0.5),
        ("perf/step_time_seconds", "0.5", 0.5),
        ("step_time_ms", 500, 0.5),
        ("ms", "1,500.0", 1.5),
        ("ms_per_step", 500, 0.5),
        ("train/steps_per_sec", 4, 0.25),
        ("steps_per_s", 4, 0.25),
        ("items", 3, 3.0),
        ("s", 0, None),
        ("s", -1.0, None),
        ("s", float("nan"), None),
        ("s", float("inf"), None),
        ("s", "soon", None),
        ("s", True, None),
        ("s", None, None),
        ("s", [1], None),
    ],
)
def test_units(key: str, value: object, seconds: float | None) -> None:
    assert seconds_of(key, value) == seconds


def test_the_coarsest_type_decides() -> None:
    assert coarsest(["bfloat16", "float32"]) == "bfloat16"
    assert coarsest(["float16", "float64"]) == "float16"
    assert coarsest(["float8_e4m3fn", "bfloat16"]) == "float8_e4m3fn"
    assert coarsest([]) == "float32"


@IN_A_FOLDER
@given(
    st.lists(st.text(st.characters(exclude_categories=["C"])), max_size=6),
    st.lists(st.integers(1, 7), max_size=20),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_lines_come_whole_and_once(
    tmp_path: Path, lines: list[str], cuts: list[int], end: str
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"")
    # `str.splitlines` knows more ends of lines than a file has: those here have none of them.
    data = "".join(f"{line}{end}" for line in lines).encode()
    tail, found = Tail(path), list[str]()
    while data:
        size = cuts.pop() if cuts else len(data)
        with path.open("ab") as file:
            file.write(data[:size])
        data = data[size:]
        found += tail.lines()
    # A pair of ends that was cut in the middle makes an empty line more.
    assert [line for line in found if line] == [line for line in lines if line]
    assert list(tail.lines()) == []


@settings(IN_A_FOLDER, max_examples=25)  # Each starts a process that looks for the pattern.
@given(st.lists(SECONDS, max_size=8), st.integers(0, 3), st.integers(1, 5))
def test_times_are_read_alike_from_both(
    tmp_path: Path, seconds: list[float], skip: int, steps: int
) -> None:
    rows = [{"step": n, "step_time": one, "loss": 1.0 / (n + 1)} for n, one in enumerate(seconds)]
    file, log = tmp_path / "m.jsonl", tmp_path / "run.log"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step_time": 1')
    log.write_text("".join(f"{row['step_time']!r} s, loss {row['loss']!r}\n" for row in rows))
    pattern = r"(?P<s>[\d.e+-]+) s, loss (?P<loss>[\d.e+-]+)"
    readers = (
        JsonReader(file, JsonLines(file=str(file)), Mark(), skip=skip, steps=steps),
        PrintedReader(log, Printed(pattern=pattern), skip=skip, steps=steps),
    )
    for reader in readers:
        found = reader.read()
        assert found.samples_s == tuple(seconds[skip:])
        assert found.seen == len(seconds)
        assert found.losses == tuple(1.0 / (n + 1) for n in range(min(len(seconds), 3)))
        few = len(seconds[skip:]) >= 3 and sum(seconds[skip:]) >= 60
        assert found.is_enough == (len(seconds[skip:]) >= steps or few)
        assert reader.read() == found


def test_a_file_of_an_earlier_run_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    row = '{"step_s": 9.0}\n'
    file.write_text(row * 20)
    mark = Mark.of(file)
    with file.open("a") as lines:
        lines.write('{"step_s": 1.0}\n')
    grown = JsonReader(file, JsonLines(file=""), mark, skip=0, steps=9)
    assert grown.read().samples_s == (1.0,)
    file.write_text('{"step_s": 2.0}\n')
    shorter = JsonReader(file, JsonLines(file=""), mark, skip=0, steps=9)
    assert shorter.read().samples_s == (2.0,)
    file.write_text('{"step_s": 3.0}\n' * 30)
    longer = JsonReader(file, JsonLines(file=""), mark, skip=0, steps=99)
    assert longer.read().samples_s == (3.0,) * 30


def test_a_log_that_was_shortened_loses_lines_and_repeats_none(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("1.0 s\n" * 10)
    reader = PrintedReader(log, Printed(pattern="([0-9.]+) s"), skip=0, steps=99)
    assert len(reader.read().samples_s) == 10
    log.write_text("1.0 s\n" * 4)
    assert len(reader.read().samples_s) == 10
    with log.open("a") as file:
        file.write("2.0 s\n")
    assert reader.read().samples_s[10:] == (2.0,)


@pytest.mark.parametrize(
    ("text", "key", "reason", "hint"),
    [
        (None, "", "the command did not write", "relative to the working directory"),
        ("", "", "wrote no whole line", ""),
        ("step 1\n", "", "none is a JSON object", ""),
        ('{"lr": 1}\n', "", "has a key that is known for step times", "keys: lr"),
        ('{"stpe_time": 1}\n', "step_time", "(did you mean `stpe_time`?)", "keys: stpe_time"),
        ('{"step_time": "soon"}\n', "step_time", "is never a number above zero", ""),
        ('{"step_time": 1}\n', "step_time", "only 1 step times were found", "--skip-steps"),
    ],
)
def test_why_no_time_was_found_in_a_file(
    tmp_path: Path, text: str | None, key: str, reason: str, hint: str
) -> None:
    file = tmp_path / "m.jsonl"
    if text is not None:
        file.write_text(text)
    reader = JsonReader(file, JsonLines(file="", key=key), Mark(), skip=2, steps=3)
    problem = reader.read().problem
    assert reason in problem[0]
    assert hint in problem[1]


def test_why_no_time_was_found_in_the_output(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("nothing here\n")
    reader = PrintedReader(log, Printed(pattern="took (.*)"), skip=0, steps=3)
    assert "no line that the command printed matches" in reader.read().problem[0]
    with log.open("a") as file:
        file.write("took long\n")
    assert "never with a number above zero" in reader.read().problem[0]


def test_of_several_timers_the_largest_step_counts(tmp_path: Path) -> None:
    def write(pid: int, *lines: dict[str, object]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{pid}.jsonl").write_text(text)

    assert "has imported jax" in CaptureReader(tmp_path).read().problem[0]
    jax = {"kind": "jax", "version": "0.10.2"}
    write(1, jax)
    assert "called three times" in CaptureReader(tmp_path).read().problem[0]
    step = {"kind": "step", "name": "f", "file": "/a/t.py", "line": 3, "devices": 8}
    losses = {"kind": "losses", "values": [1.0], "dtypes": ["float32"]}
    sample = {"kind": "sample", "seconds": 0.5, "steps": 4}
    write(2, jax, step | {"argument_bytes": 9}, losses, sample)
    write(3, jax, step | {"argument_bytes": 4096}, losses, sample, step | {"argument_bytes": 9000})
    found = CaptureReader(tmp_path).read()
    # A larger step replaces the samples of a smaller one.
    assert (found.samples_s, found.losses, found.is_enough) == ((), (), False)
    assert "not often enough to be timed" in found.problem[0]
    assert str(found.step) == "`f` (t.py:3), 8.79 KiB of arguments"
    write(2, jax, step | {"argument_bytes": 9}, losses, sample, {"kind": "done"})
    found = CaptureReader(tmp_path).read()
    assert (found.samples_s, found.seen, found.is_enough) == ((0.5,), 4, True)
    assert (found.losses, found.loss_dtype) == ((1.0,), "float32")
    write(4, jax, {"kind": "error", "text": "TypeError: x"}, step | {"argument_bytes": 99999})
    (tmp_path / "2.jsonl").unlink()
    assert CaptureReader(tmp_path).read().problem[0] == "the timer failed: TypeError: x"


def test_lines_that_no_timer_has_written_are_left_out(tmp_path: Path) -> None:
    step = '{"kind": "step", "name": "step", "file": "t.py", "line": 3}\n'
    sample = '{"kind": "sample", "seconds": 0.5, "steps": 2}\n'
    path = tmp_path / "1.jsonl"
    bad = ["{\n", "[]\n", '{"kind": "sample"}\n', '{"kind": "sample", "seconds": -1, "steps": 1}\n']
    bad += ['{"kind": "step", "nam": 1}\n', "[" * 100_000 + "\n", '{"kind": 7}\n', "\n"]
    path.write_text("".join(bad) + step + sample + '{"kind": "done"}\n')
    steps = CaptureReader(tmp_path).read()
    assert (steps.samples_s, steps.seen, steps.is_enough) == ((0.5,), 2, True)
    path.write_text("".join(bad))
    what, _ = CaptureReader(tmp_path).read().problem
    assert what.startswith("a line that the timer wrote is damaged: ")


def test_a_file_of_steps_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    os.mkfifo(path)
    assert Mark.of(path) == Mark()
    what, hint = JsonReader(path, JsonLines(file=str(path)), Mark(), skip=0, steps=1).read().problem
    assert what == f"`{path}` cannot be read: it is a named pipe, not a file"
    assert "regular file" in hint


def test_lines_without_an_end_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    long = limits.REPORT_LINE_BYTES + 5
    path.write_bytes(b"a\n" + b"x" * long + b"\nb\n" + b"y" * long)
    tail = Tail(path)
    assert list(tail.lines()) == ["a", "b"]
    with path.open("ab") as file:
        file.write(b"y" * long + b"\nc\n")
    assert list(tail.lines()) == ["c"]


@pytest.mark.parametrize("text", ["5e-324", "1e-320", "1e308", "9" * 400])
def test_a_figure_without_an_inverse_is_no_step_time(text: str) -> None:
    for name in ("s", "step_ms", "steps_per_s"):
        found = seconds_of(name, text)
        assert found is None or 0 < found < math.inf
