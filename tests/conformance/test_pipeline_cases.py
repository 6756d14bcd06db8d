"""The cases of other systems' schedules, each as a test, and the table of deviations."""

from __future__ import annotations

import doctest
import tomllib

import pytest

from automesh.pipeline import SCHEDULES
from tests.conformance.cases import DATA, Numbered, cases_of
from tests.conformance.deviations import Deviation
from tests.conformance.groups.pipeline import GROUPS
from tests.conformance.outcomes import Verdict
from tests.support import paths
from tests.support.paths import ROOT

TABLE = paths.DATA / "deviations_pipeline.toml"
PAGE = ROOT / "docs" / "pipelines.md"
CASES = [one for one in cases_of(DATA) if one.group in GROUPS]


def read_table() -> list[Deviation]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["deviation"]
    return [
        Deviation(**{**row, "systems": tuple(row["systems"]), "cases": tuple(row["cases"])})
        for row in rows
    ]


def judged(one: Numbered) -> Verdict:
    return GROUPS[one.group](one.case, one.about)


@pytest.mark.parametrize("one", CASES, ids=str)
def test_case(one: Numbered) -> None:
    verdict = judged(one)
    listed = [row.name for row in read_table() if str(one) in row.cases]
    if listed:
        assert (verdict.status, [verdict.deviation]) == ("deviated", listed), verdict.detail
    else:
        assert verdict.status == "passed", verdict.detail


def test_all_cases_are_there() -> None:
    assert len(CASES) == 63 + 3 + 7
    assert {name for row in read_table() for name in row.cases} <= {str(one) for one in CASES}


def test_a_wrong_order_fails() -> None:
    one = next(one for one in CASES if one.case.get("schedule") == "jaxpp.Std1F1B")
    wrong = {**one.case, "simulated": {**one.case["simulated"], "peak_live_per_rank": [2, 2]}}
    assert GROUPS[one.group](wrong, one.about).status == "failed"
    wrong = {**one.case, "order": [" ".join(reversed(line.split())) for line in one.case["order"]]}
    assert GROUPS[one.group](wrong, one.about).status == "failed"
    one = next(one for one in CASES if one.group == "multimesh_wavefront")
    wrong = {**one.case, "global_order": one.case["global_order"][::-1]}
    assert GROUPS[one.group](wrong, one.about).status == "failed"
    one = next(one for one in CASES if one.group == "jaxpp_schedule_errors")
    wrong = {**one.case, "call": one.case["call"].replace("-1", "2")}
    assert GROUPS[one.group](wrong, one.about).status == "failed"


def test_the_page_shows_the_table_and_all_schedules_and_its_examples_hold() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in SCHEDULES)
    # The blank line before a closing fence ends what an example prints.
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 5
    assert outcome.failed == 0
    for row in read_table():
        line = f"| {row.title} | {row.old} ({', '.join(row.systems)}) | {row.new} | {row.why} |"
        assert line in page
