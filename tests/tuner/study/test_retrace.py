"""Steps that are traced to another program in another process: found, named, and failed alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import automesh
from automesh.errors import AutomeshError, UsageError
from automesh.mesh.axes import MeshAxis, Plan, Scalar
from automesh.outcomes import Failed, Failure
from automesh.program.lower.program_text import (
    Difference,
    TextLine,
    first_difference,
    read_lines,
    read_text,
    write_text,
)
from automesh.program.nouns import Entry, StepRef, Traced
from automesh.program.script.sources import edited_files, hash_of_file, hash_of_sources
from automesh.tuner.measure.schedule import Subject
from automesh.tuner.study.retrace import OTHER_PROGRAM, explain_programs, other_program
from automesh.worker.messages import Surroundings, TraceJob
from automesh.worker.pool import Pool
from benchmarks.support.search_process import SearchProcess
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import MEBIBYTE, ROOT

SCRIPT = SCRIPTS / "nondeterministic.py"
PRINTED = """\
#loc = loc(unknown)
module @jit_step {
  func.func public @main(%arg0: tensor<4xf32> loc("w")) -> tensor<4xf32> {
    %cst = stablehlo.constant dense<2.0> : tensor<f32> loc(#loc)
    %0 = stablehlo.sine %arg0 : tensor<4xf32> loc(#loc4)
    return %0 : tensor<4xf32> loc(#loc5)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("/lib/jax/numpy.py":99:1)
#loc2 = loc("/home/me/train.py":7:11 to :21)
#loc3 = loc(callsite(#loc1 at #loc2))
#loc4 = loc("jit(step)/sin"(#loc3))
#loc5 = loc("jit(step)"(#loc5))
"""
PLAIN = """\
module @jit_step {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %cst = stablehlo.constant dense<2.0> : tensor<f32>
    %0 = stablehlo.sine %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def plain(*texts: str) -> tuple[TextLine, ...]:
    return tuple(TextLine(text=text, place="") for text in texts)


def test_a_line_gets_the_innermost_place_of_the_users_code() -> None:
    lines = read_lines(PLAIN, PRINTED, is_users=lambda path: path.startswith("/home"))
    assert [line.text for line in lines] == PLAIN.splitlines()
    assert [line.place for line in lines] == ["", "", "", "train.py:7", "", "", ""]


def test_another_program_has_no_places() -> None:
    with pytest.raises(AutomeshError, match="8 lines of a program have 7 places"):
        read_lines(PLAIN + "more\n", PRINTED, is_users=lambda path: True)


def test_a_constant_has_the_place_of_what_uses_it() -> None:
    lines = read_lines(PLAIN, PRINTED, is_users=lambda path: path.startswith("/home"))
    other = read_lines(
        PLAIN.replace("2.0", "3.0"), PRINTED.replace("2.0", "3.0"), is_users=lambda path: False
    )
    assert str(first_difference(lines, other)) == (
        "`%cst = stablehlo.constant dense<2.0> : tensor<f32>` (train.py:7) in one, "
        "`%cst = stablehlo.constant dense<3.0> : tensor<f32>` in the other"
    )


def test_a_long_line_is_cut_around_what_differs() -> None:
    long = "%cst = stablehlo.constant dense<" + "0" * 500
    found = first_difference(plain(f"{long}1{'2' * 500}>"), plain(f"{long}7{'2' * 500}>"))
    assert found is not None
    assert found.line.startswith("%cst = stablehlo.constant") and "01222" in found.line
    assert "07222" in found.other and len(found.line) < 100


def test_a_program_that_goes_on_differs_where_the_other_ends() -> None:
    found = first_difference(plain("a"), plain("a", "b"))
    assert found == Difference(line="(nothing)", other="b", place="")


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r\t"), max_size=200), min_size=1),
    st.data(),
)
def test_the_first_difference_is_the_first(texts: list[str], data: st.DataObject) -> None:
    lines = plain(*texts)
    assert first_difference(lines, lines) is None
    index = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts[:index], texts[index].strip() + "!", *texts[index + 1 :]]
    found = first_difference(lines, plain(*changed))
    assert found is not None
    assert found.line != found.other


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\n\r")),
            st.sampled_from(["", "train.py:12"]),
        ),
        min_size=1,
    )
)
def test_a_text_is_read_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    lines = tuple(TextLine(text=text, place=place) for text, place in pairs)
    file = tmp_path_factory.mktemp("text") / "program.txt"
    write_text(file, lines)
    assert read_text(file) == lines


def test_files_that_changed_or_vanished_are_edited(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for file in files:
        file.write_text("x = 1\n")
    sources = tuple((str(file), hash_of_file(file)) for file in files)
    before = hash_of_sources(sources)
    assert edited_files(sources) == ()
    files[0].write_text("x = 2\n")
    files[2].unlink()
    assert edited_files(sources) == (str(files[0]), str(files[2]))
    changed = ((str(files[0]), hash_of_file(files[0])), *sources[1:])
    assert hash_of_sources(changed) != before


@dataclass(kw_only=True)
class FakeTraces:
    """Writes one text after the other where programs are asked for."""

    texts: list[str]
    recycled: int = 0
    jobs: list[TraceJob] = field(default_factory=list)

    def trace(self, job: TraceJob, timeout_s: float) -> Traced | Failure:
        self.jobs.append(job)
        text = self.texts[len(self.jobs) - 1]
        if not text:
            return Failed(stage="lower", reason="no")
        write_text(Path(job.text_file), plain(*text.splitlines()))
        return Traced(fingerprint=text)

    def recycle(self) -> None:
        self.recycled += 1


PLAN = Plan(axes=(MeshAxis(name="dp", ici=2),), knobs=(("order", "set"),))


def subject(script: Path) -> Subject:
    return Subject(
        step=StepRef(entry=Entry(kind="script", location=str(script)), axis_types=("auto",)),
        cache_dir="",
        sources=((str(script), hash_of_file(script)),),
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a\nb", "a\nc"], "in every process: `b` in one, `c` in the other"),
        (["a", "a"], "in every process, at a place that two more traces do not show"),
        (["a", ""], "in every process, at a place that two more traces do not show"),
    ],
)
def test_a_plan_with_another_program_fails_with_the_first_line_that_differs(
    texts: list[str], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    pool, step = FakeTraces(texts=texts), subject(script)
    assert other_program(step.sources) == OTHER_PROGRAM
    failed = explain_programs(pool, step.step, [PLAN], 60.0)[PLAN]
    assert failed.stage == "lower"
    assert failed.reason == f"the step is traced to another program {said}"
    assert pool.recycled == 1
    assert [job.plan for job in pool.jobs] == [PLAN, PLAN]


def test_many_plans_are_traced_in_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    pool = FakeTraces(texts=["a", "b", "a", "c"])
    plans = [Plan(axes=(MeshAxis(name="dp", ici=size),)) for size in (1, 2)]
    found = explain_programs(pool, subject(script).step, plans, 60.0)
    assert pool.recycled == 1
    assert "two more traces do not show" in found[plans[0]].reason
    assert "`b` in one, `c` in the other" in found[plans[1]].reason


def test_an_edited_script_is_no_fault_of_a_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    before = subject(script)
    script.write_text("# edited\n")
    with pytest.raises(UsageError, match=r"changed while it was searched: `.*train\.py`"):
        other_program(before.sources)


def trace(folder: Path, seed: str, **knobs: Scalar) -> tuple[TextLine, ...]:
    """The program of the script in a process of its own."""
    folder.mkdir()
    file = folder / "program.txt"
    around = Surroundings(
        platforms="cpu", cpu_devices=2, variables=(("PYTHONHASHSEED", seed), ("PYTHONPATH", ROOT))
    )
    job = TraceJob(
        step=StepRef(entry=Entry(kind="script", location=str(SCRIPT)), axis_types=("auto",)),
        plan=Plan(axes=(MeshAxis(name="dp", ici=2),), knobs=tuple(knobs.items())),
        text_file=str(file),
    )
    with Pool(
        size=1, surroundings=around, log_dir=folder, memory_limit_bytes=4096 * MEBIBYTE
    ) as pool:
        answer = pool.run(job, 300.0)
    assert isinstance(answer, Traced), answer
    return read_text(file)


@pytest.mark.slow
def test_a_set_of_names_has_one_order_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    # Empty is nothing: what a worker gets that is told of no seed.
    one, again = (trace(tmp_path / name, "", order="set") for name in ("one", "again"))
    assert one == again
    other = trace(tmp_path / "other", "1", order="set")
    found = first_difference(one, other)
    assert found is not None
    assert found.place == "nondeterministic.py:17"


@pytest.mark.long
def test_a_step_with_the_time_in_it_fails_alone(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text('[axes]\ndp = {}\n[knobs]\norder = ["sorted", "set", "time"]\n')
    options = {
        "--target": "cpu:2",
        "--space": str(space),
        "--top": "3",
        "--budget": "1m",
        "--results": str(tmp_path / "results"),
        "--rules": str(tmp_path / "mesh_rules.toml"),
    }
    pairs = [part for pair in options.items() for part in pair]
    process = SearchProcess([str(SCRIPT), *pairs], tmp_path)
    assert process.finish(600) == 0, process.words
    command = [sys.executable, "-m", "automesh", "show", "--json"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
        timeout=600,
    )
    shown = json.loads(done.stdout)
    found = {one["knobs"]["order"]: one["outcome"] for one in shown["candidates"]}
    kinds = {order: outcome["kind"] for order, outcome in found.items()}
    assert kinds == {"sorted": "measured", "set": "measured", "time": "failed"}
    reason = found["time"]["reason"]
    assert reason.startswith("the step is traced to another program in every process: `")
    assert "(nondeterministic.py:" in reason
    assert shown["versions"]["PYTHONHASHSEED"] == "0"
    rules = tmp_path / "mesh_rules.toml"
    assert automesh.load(rules).select("cpu-2").knobs["order"] in ("sorted", "set")
    # What the processes of the search were told is no evidence of the rule.
    assert "PYTHONHASHSEED" not in rules.read_text()
