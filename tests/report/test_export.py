"""trials.csv, the DataFrame and --json."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings

from automesh import jsonio
from automesh.answers import Result
from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan, parse_mesh
from automesh.outcomes import Compiled, Estimated, Measured, Outcome
from automesh.report.estimates import Estimates
from automesh.report.files.csv import dataframe, estimates_rows, write_estimates, write_table
from tests.report.test_table import results
from tests.support.samples import results_samples

RESULT = results_samples.measured_search()


def test_one_row_per_candidate_in_order() -> None:
    table = dataframe(RESULT)
    assert list(table["mesh"]) == [one.plan.mesh for one in RESULT.candidates]
    assert list(table["kind"]) == [one.outcome.kind for one in RESULT.candidates]
    assert table["rank"].tolist() == [1, 2, 3, 4, 5, 6] + [pd.NA] * 5


def test_plan_columns_give_the_mesh_back() -> None:
    result = results_samples.compiled_search()
    for row, candidate in zip(dataframe(result).to_dict("records"), result.candidates, strict=True):
        for axis in candidate.plan.axes:
            assert row[f"axis.{axis.name}"] == axis.size
            assert row[f"dcn.{axis.name}"] == axis.dcn
        assert row["knob.microbatches"] == dict(candidate.plan.knobs)["microbatches"]


def test_figures_of_a_measured_and_a_compiled_plan() -> None:
    rows = {row["mesh"]: row for row in dataframe(RESULT).to_dict("records")}
    ran = rows["dp:2,fsdp:2,tp:2"]
    assert ran["step_s"] == 0.0131 and ran["predicted_s"] == 0.0098
    assert ran["flops"] == 81_000_000_000 and ran["collective_wire_bytes"] == 9_000_000 + 7_000_000
    assert ran["collectives"] == 13 and ran["rounds"] == 3 and ran["raced_out"] is True
    assert ran["tokens_per_s"] == pytest.approx(2048 / 0.0131)
    guessed = rows["fsdp:8"]
    assert guessed["step_s"] == guessed["predicted_s"] == 0.0152
    assert pd.isna(guessed["step_low_s"]) and pd.isna(guessed["numerics"])


def test_failures_say_why() -> None:
    rows = {row["mesh"]: row for row in dataframe(RESULT).to_dict("records")}
    assert rows["ep:8"]["reason"] == "timed out after 60 s while compiling"
    assert rows["ep:8"]["limit_s"] == 60.0
    assert rows["dp:1"]["needed_bytes"] == 31 * 2**30 // 10
    assert rows["tp:8"]["reason"].startswith("numerics differ: ")
    assert pd.isna(rows["tp:8"]["rank"])


def test_counts_beyond_64_bits_are_kept() -> None:
    first = RESULT.candidates[0]
    big = results_samples.compiled(1.0)
    big = replace(big, counts=replace(big.counts, flops=10**20))
    table = dataframe(replace(RESULT, candidates=(replace(first, compiled=big), first)))
    assert table["flops"][0] == 1e20


def test_csv_holds_what_the_dataframe_holds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.csv"
    write_table(dataframe(RESULT), path)
    read = pd.read_csv(path)
    made = dataframe(RESULT)
    assert list(read.columns) == list(made.columns)
    for name in ("step_s", "peak_bytes", "flops", "ratio_low"):
        assert read[name].isna().tolist() == made[name].isna().tolist()
        assert read[name].dropna().tolist() == made[name].dropna().tolist()
    assert read["reason"].dropna().tolist() == made["reason"].dropna().tolist()


def test_estimates_are_written_as_pandas_would(tmp_path: Path) -> None:
    figures = [(1e-5, 0.1 + 0.2, 1e16), (3.5, 1e15, 0.0), (2.0, 1 / 3, 123456789.123)]
    plans = [
        Plan(axes=(MeshAxis(name="dp", ici=2, dcn=4),), knobs=knobs)
        for knobs in (
            (("n", 1), ("remat", True), ("loss", 'a "b", c')),
            (("n", 2), ("remat", False), ("rate", 1)),
            (("n", 2), ("remat", "full"), ("rate", 0.5)),
        )
    ]
    found = {
        plan: Estimated(
            step_s=step_s,
            bracket_s=(low_s, high_s),
            bound_s=low_s if step_s > 1 else 0.0,
            memory_bytes=2**40 + 1,
            causes=(("compute", low_s),) if step_s > 1 else (("ici dp", high_s),),
            uncounted=("a loop",) if step_s > 1 else (),
        )
        for plan, (step_s, low_s, high_s) in zip(plans, figures, strict=True)
    }
    late = replace(plans[0], knobs=(("n", 3), ("flag", True), ("whole", 7)))
    for estimates in (
        Estimates(found=found),
        Estimates(found=found, missing={late: "no time\nat all"}),
        Estimates(missing={late: "no time"}),
    ):
        path = tmp_path / "estimates.csv"
        write_estimates(estimates, path)
        names, rows = estimates_rows(estimates)
        table = pd.DataFrame(rows, columns=names)
        write_table(table.astype({"rank": "Int64", "memory_bytes": "Int64"}), tmp_path / "own.csv")
        assert path.read_text() == (tmp_path / "own.csv").read_text()
        for row, one in zip(
            rows, sorted(estimates.found.values(), key=lambda one: one.step_s), strict=False
        ):
            assert (row["estimated_s"], row["low_s"], row["high_s"]) == (one.step_s, *one.bracket_s)


def test_csv_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    path.write_text("old")
    before = path.stat().st_ino
    write_table(dataframe(RESULT), path)
    assert path.stat().st_ino != before  # a new file took the name: nobody saw half of it
    assert [one.name for one in tmp_path.iterdir()] == ["trials.csv"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_an_old_csv_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.csv"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="cannot be written: no space left on device"):
        write_table(dataframe(RESULT), path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["trials.csv"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written") as caught:
        write_table(dataframe(RESULT), tmp_path / "file" / "trials.csv")
    assert "--results" in caught.value.hint


def test_json_is_strict_and_complete() -> None:
    data = json.loads(json.dumps(Result(found=RESULT).to_json(), allow_nan=False))
    assert data["schema"] == 1
    assert data["best"] == {
        "plan": "dp:2,tp:4 remat=dots",
        "evidence": "measured",
        "step_s": 0.0123,
        "speedup": 1.309,
        "speedup_interval": [1.271, 1.353],
        "is_tie": False,
        "most_faster": None,
        "bracket_s": None,
        "exposed_s": None,
        "mfu": None,
    }
    assert data["baseline"] == "dp:8 remat=full"
    assert data["funnel"]["ruled_out"][0] == {"rule": "axis ep is never used", "count": 120}
    assert [one["evidence"] for one in data["candidates"]] == (
        ["measured"] * 4 + ["compiled"] * 2 + ["measured"] * 2 + ["none"] * 3
    )


def test_json_gives_plans_and_outcomes_back() -> None:
    data = json.loads(json.dumps(Result(found=RESULT).to_json()))
    for row, candidate in zip(data["candidates"], RESULT.candidates, strict=True):
        assert jsonio.from_json(row["outcome"], Outcome) == candidate.outcome
        assert parse_mesh(row["mesh"]) == candidate.plan.axes
        assert tuple(row["knobs"].items()) == candidate.plan.knobs
        if isinstance(candidate.outcome, Compiled):
            assert jsonio.from_json(row["compiled"], Compiled) == candidate.outcome


def test_json_has_no_nan() -> None:
    first = RESULT.candidates[0]
    assert isinstance(first.outcome, Measured)
    blank = replace(first, outcome=replace(first.outcome, losses=(math.nan, math.inf)))
    data = Result(found=replace(RESULT, candidates=(blank,))).to_json()
    assert data["candidates"][0]["outcome"]["losses"] == [None, None]


def test_json_of_an_unmeasured_search_claims_no_speedup() -> None:
    data = Result(found=results_samples.compiled_search()).to_json()
    assert data["best"]["evidence"] == "compiled" and data["best"]["speedup"] is None
    assert data["interrupted"] is True and data["rules_path"] is None
    assert "secret" not in json.dumps(data)
    assert Result(found=results_samples.empty_search()).to_json()["best"] is None


def test_json_of_a_search_without_a_baseline_claims_no_speedup() -> None:
    alone = replace(RESULT, candidates=RESULT.candidates[:1])
    assert Result(found=alone).to_json()["best"]["speedup"] is None


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(result=results())
def test_any_result_can_be_exported(result: object) -> None:
    assert len(dataframe(result)) == len(result.candidates)
    json.loads(json.dumps(Result(found=result).to_json(), allow_nan=False))
