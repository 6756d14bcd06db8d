"""The table at every width: golden files, and nothing too long or cut for any result."""

import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed, OutOfMemory, RuledOut, TimedOut
from automesh.report.blocks.columns import wrapped
from automesh.report.blocks.terminal import render
from automesh.report.columns import varying_knobs
from automesh.report.comparison import COMPARED, Comparison, Verdict, Verification
from automesh.report.result import NOT_ENDED, Candidate, Funnel
from automesh.report.table import report_of, summary
from tests.support.cases import results_golden
from tests.support.cases.results_golden import CASES, FOLDER
from tests.support.samples import results_samples
from tests.support.samples.changed_results import changed

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert CASES[name]() == expected, "if this is right: python -m tests.regenerate.update_golden"


def test_golden_folder_has_no_other_files() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_golden_lines_fit_and_nothing_is_cut(name: str) -> None:
    width = int(next(part for part in name.split("_") if part.isdigit()))
    text = ANSI.sub("", CASES[name]())
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_colour_changes_no_text() -> None:
    plain = results_golden.table(results_samples.measured_search, width=80)
    coloured = results_golden.table(results_samples.measured_search, width=80, colour=True)
    assert coloured != plain
    stripped = [line.rstrip() for line in ANSI.sub("", coloured).splitlines()]
    assert stripped == plain.splitlines()
    assert "\x1b" not in plain


def test_environment_does_not_decide_about_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "33")
    drawn = results_golden.table(results_samples.measured_search, width=80)
    assert drawn == (FOLDER / "measured_80.txt").read_text(encoding="utf-8")


def test_every_kind_of_figure_is_marked() -> None:
    text = results_golden.table(results_samples.measured_search, width=120)
    header = next(line for line in text.splitlines() if line.startswith("mesh"))
    assert "memory *" in header and "bound by *" in header
    row = next(line for line in text.splitlines() if line.startswith("fsdp:8"))
    assert "15.2 ms *" in row and "+17 % *" in row and "135 k *" in row
    best = next(line for line in text.splitlines() if line.startswith("dp:2,tp:4"))
    assert "*" not in best and "±1.2 %" in best
    assert "* predicted from the compiled program, not measured" in text


def test_memory_is_unmarked_only_where_the_device_reported_it() -> None:
    result = results_samples.measured_search()
    first, *rest = result.candidates
    own = replace(first, peak_bytes=900 * 2**20, compiled=results_samples.compiled(0.01))
    text = render(
        report_of(replace(result, candidates=(own, *rest)), top=5), width=120, colour=False
    )
    assert re.search(r"dp:2,tp:4 .* 900 MiB    \S", text)
    assert re.search(r"dp:4,tp:2 .* 768 MiB \*", text)


def test_narrow_terminals_lose_the_least_important_columns_first() -> None:
    headers = {
        width: next(
            line
            for line in results_golden.table(
                results_samples.measured_search, width=width
            ).splitlines()
            if line.startswith("mesh")
        )
        for width in (40, 60, 80, 120)
    }
    assert "tokens/s" in headers[120]
    assert "tokens/s" not in headers[80] and "bound by" in headers[80]
    assert "memory" not in headers[60] and "remat" in headers[60]
    assert all("step time" in header and "vs new" in header for header in headers.values())
    narrow = results_golden.table(results_samples.measured_search, width=40)
    assert "±" not in narrow  # neither the column nor its footnote
    assert "step times without a mark are measured" in " ".join(narrow.split())
    assert "remat=dots" in narrow.split("best ")[0]  # below its mesh, not lost


def test_top_cuts_rows_but_never_the_baseline() -> None:
    text = render(report_of(results_samples.measured_search(), top=1), width=80, colour=False)
    assert "dp:2,tp:4" in text and "dp:8 (script)" in text
    assert "dp:4,tp:2 " not in text
    assert "and 4 more plans behind these" in text
    assert "and 4 more of these in trials.csv" in text


def test_duplicates_have_no_row_of_their_own() -> None:
    result = results_samples.compiled_search()
    first, second, *rest = result.candidates
    same = replace(second, outcome=replace(second.outcome, same_as=str(first.plan)))
    text = render(
        report_of(replace(result, candidates=(first, same, *rest)), top=9), width=120, colour=False
    )
    assert second.plan.mesh not in text
    assert "and 1 plan with a program that another plan has" in text


def test_passwords_and_escape_codes_are_not_shown() -> None:
    result = results_samples.compiled_search()
    command = "automesh search x.py --storage postgresql://me:secret@host/db"
    nasty = replace(result, command=command, notices=("\x1b[31mred\x1b[0m\nline \x07 bell…",))
    text = render(report_of(nasty, top=5), width=120, colour=False)
    assert "secret" not in text
    assert "note      red line bell..." in text


def test_summary_leaves_out_what_is_empty() -> None:
    labels = [label for label, _ in summary(results_samples.empty_search()).lines]
    assert labels == ["best", "tried", "ruled out", "stopped", "saved", "next"]


def test_knobs_that_never_vary_are_not_shown() -> None:
    assert varying_knobs(results_samples.measured_search().candidates) == ("remat",)
    assert varying_knobs(results_samples.compiled_search().candidates) == ("microbatches",)


def test_an_option_left_at_its_default_tells_plans_apart() -> None:
    first, second = results_samples.measured_search().candidates[:2]
    plan = replace(first.plan, knobs=(), compiler_options=(("xla_flag", 8),))
    changed = replace(first, plan=plan)
    second = replace(second, plan=replace(second.plan, knobs=()))
    assert varying_knobs([changed, second]) == ("xla_flag",)


def test_a_mesh_breaks_after_commas() -> None:
    assert wrapped("dcn.dp:2,fsdp:8,tp:4 remat=full", 16) == "dcn.dp:2,fsdp:8,\ntp:4 remat=full"
    assert wrapped("dp:8", 3) == "dp:8"


TEXT = st.text(max_size=60)
SECONDS = st.floats(min_value=1e-9, max_value=1e6)
BYTES = st.integers(min_value=0, max_value=2**45)


@st.composite
def outcomes(draw: st.DrawFn) -> object:
    step_s = draw(SECONDS)
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return results_samples.compiled(step_s)
    if kind == 1:
        return OutOfMemory(
            stage=draw(st.sampled_from(["compile", "run", "other"])),
            needed_bytes=draw(BYTES),
            limit_bytes=draw(BYTES),
            detail=draw(TEXT),
        )
    if kind == 2:
        return Failed(stage=draw(TEXT), reason=draw(TEXT))
    if kind == 3:
        return TimedOut(stage="run", limit_s=step_s)
    if kind == 4:
        return RuledOut(rule=draw(TEXT), detail=draw(TEXT))
    return results_samples.measured(
        step_s,
        half=draw(st.floats(0, 3)),
        numerics=draw(st.sampled_from(["agree", "differ", "unverified", "reference"])),
        numerics_detail=draw(TEXT),
        confirmed=draw(st.booleans()),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 8, 512]), min_size=10, max_size=10))
    names = ["dp", "fsdp", "ep", "tp", "sp"]
    knob = st.one_of(st.booleans(), st.integers(), st.floats(), TEXT)
    verdicts = list(get_args(Verdict))
    ratio = draw(st.floats(0.01, 1e4))
    return Candidate(
        plan=Plan(
            axes=tuple(
                MeshAxis(name=name, ici=sizes[place], dcn=sizes[place + 5])
                for place, name in enumerate(names)
            ),
            knobs=tuple(draw(st.dictionaries(TEXT, knob, max_size=3)).items()),
            compiler_options=draw(st.sampled_from([(), (("xla_very_long_option_" * 4, 1),)])),
        ),
        outcome=draw(outcomes()),
        standing=Comparison(
            verdict=draw(st.sampled_from(verdicts)),
            ratio=ratio,
            interval=(ratio * 0.9, ratio),
            step_s=draw(st.sampled_from([0.0, 0.01])),
            more_s=draw(st.sampled_from([0.0, 200.0])),
        ),
        bound_by=draw(TEXT),
        peak_bytes=draw(BYTES),
        is_baseline=draw(st.booleans()),
        compiled=draw(st.sampled_from([None, results_samples.compiled(0.1)])),
    )


NUMBER = st.integers(min_value=0, max_value=10**7)


@st.composite
def results(draw: st.DrawFn) -> object:
    counts = {
        name: draw(NUMBER)
        for name in (
            "enumerated",
            "legal",
            "compiled",
            "duplicates",
            "out_of_memory",
            "failed",
            "timed_out",
            "waiting",
            "measured",
        )
    }
    speedup = draw(st.floats(0.1, 100))
    verification = Verification(
        processes=draw(st.integers(0, 9)),
        baseline=draw(TEXT),
        gain=Comparison(
            verdict=draw(st.sampled_from(COMPARED)),
            ratio=speedup,
            interval=(speedup * 0.9, speedup * 1.1),
        ),
        most_faster=draw(st.sampled_from([(), (0.0,), (0.07,)])),
    )
    return changed(
        results_samples.measured_search(),
        workload=draw(TEXT),
        kind=draw(TEXT),
        count=draw(NUMBER),
        candidates=tuple(draw(st.lists(candidates(), max_size=5))),
        funnel=Funnel(
            ruled_out=tuple(draw(st.lists(st.tuples(TEXT, NUMBER), max_size=6))), **counts
        ),
        verifications=draw(st.sampled_from([(), (verification,)])),
        stop_reason=draw(TEXT),
        notices=tuple(draw(st.lists(TEXT, max_size=2))),
        tokens_per_step=draw(NUMBER),
        location=draw(TEXT),
        command=draw(TEXT),
        interrupted=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(result=results(), width=st.integers(40, 200), top=st.integers(0, 6), colour=st.booleans())
def test_any_result_fits_any_width(result: object, width: int, top: int, colour: bool) -> None:
    text = ANSI.sub("", render(report_of(result, top=top), width=width, colour=colour))
    assert text.endswith("\n")
    assert "…" not in text and "\ue000" not in text and "\x1b" not in text
    for line in text.splitlines():
        assert cell_len(line) <= width, line


def test_details_wait_behind_verbose() -> None:
    result = results_samples.measured_search()
    (detail,) = result.facts.details
    plain = render(report_of(result, top=5), width=200, colour=False)
    assert detail not in plain
    assert f"detail    {detail}" in render(
        report_of(result, top=5, verbose=True), width=200, colour=False
    )


def test_the_file_of_estimates_is_named_once_it_is_there() -> None:
    """A dry run that was killed had named a file that it had not written."""
    base = results_samples.compiled_search()
    funnel = replace(base.funnel, estimated=3, waiting=base.funnel.legal)
    ended = changed(base, funnel=funnel, results_dir="results/x", stop_reason="dry run")
    named = "results/x/estimates.csv (all 3 estimates)"
    assert named in render(report_of(ended, top=5), width=120, colour=False)
    killed = changed(ended, stop_reason=NOT_ENDED)
    assert named not in render(report_of(killed, top=5), width=120, colour=False)


def test_a_predicted_time_is_of_the_same_kind_as_the_measured_ones() -> None:
    """The best was measured with 229 ms, its prediction was 38.5 ms: a plan that was predicted with
    15.2 ms seemed to be the fastest one, beside "+17 %"."""
    result = results_samples.measured_search()
    best_s = 12.3e-3
    rows = tuple(
        replace(one, standing=replace(one.standing, ratio=4.0, step_s=4.0 * best_s, basis="replay"))
        if one.standing.verdict == "not_measured"
        else one
        for one in result.candidates
    )
    text = render(report_of(replace(result, candidates=rows), top=5), width=80, colour=False)
    words = " ".join(text.split())
    assert "49.2 ms * 4.00x *" in words
    assert "not measured (the best's measured time, times the ratio of both predictions)" in words
