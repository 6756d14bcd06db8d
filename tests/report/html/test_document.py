"""The document of a page, and the page around it: complete, safe, small; no browser is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from functools import cache

import pytest

from automesh.outcomes import Measured
from automesh.report.files.rule import rule_of
from automesh.report.html.document import COLUMNS, _predicted_gain, document_of, plan_rows
from automesh.report.html.notebook import summary_html
from automesh.report.html.page import charts, page_text
from automesh.report.words import best_sentence, funnel_sentence
from tests.support.samples.page_samples import HOSTILE, PAGES, large, pipelined, recorded, replayed


@cache
def text_of(name: str) -> str:
    return page_text(document_of(PAGES[name]()))


def embedded(text: str, name: str) -> object:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("name", PAGES)
def test_the_page_holds_its_document_and_nothing_that_loads(name: str) -> None:
    text = text_of(name)
    assert embedded(text, "document") == document_of(PAGES[name]())
    assert len(text.encode()) <= 6e6
    assert not re.search(
        r"<(?:link|img|iframe|object|embed|form|base)\b", text.lower().split("<script")[0]
    )
    assert not re.search(r"<script[^>]*\bsrc=", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_policy_names_the_only_scripts_that_run(name: str) -> None:
    text = text_of(name)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]
    named = set(re.findall(r"'sha256-([^']+)'", policy[1]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashed = {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    }
    assert hashed == named and len(scripts) == 4


def test_no_text_of_a_study_ends_its_element() -> None:
    text = text_of("hostile")
    assert "</script><script>window" not in text
    assert "<img src=x" not in text
    document = embedded(text, "document")
    assert isinstance(document, dict) and document["workload"] == HOSTILE


def test_the_answer_is_the_one_of_the_terminal() -> None:
    page = pipelined()
    document = document_of(page)
    assert document["verdict"]["sentence"] == best_sentence(page.result)
    assert document["funnel"]["sentence"] == funnel_sentence(page.result.funnel)
    (rule,) = tomllib.loads(document["rule"]["text"])["rule"]
    assert rule["match"] == rule_of(page.result).match
    assert "batch_axes" not in rule


def test_a_row_for_every_plan() -> None:
    page = large()
    rows = plan_rows(page.result, page.estimated)
    assert len(rows) == 5000
    assert all(set(row) <= set(COLUMNS) for row in rows)
    ranks = [row["rank"] for row in rows if row.get("rank")]
    assert ranks == list(range(1, len(ranks) + 1)) and len(ranks) > 3


def test_predictions_lie_around_their_line() -> None:
    found = document_of(recorded("dense_lm"))["predictions"]
    for basis in found["factors"]:
        rows = [row for row in found["rows"] if row["basis"] == basis]
        assert len(rows) > 2
        logs = 1.0
        for row in rows:
            logs *= 1 + row["residual"]
        assert logs == pytest.approx(1.0)


def test_a_replay_is_drawn_whole_or_says_what_is_not() -> None:
    page = replayed()
    for drawn, one in zip(page.timelines, document_of(page)["timelines"], strict=True):
        assert len(one["slices"]) + one["left_out"] == len(drawn.timeline.slices)
        assert set(one["tracks"]) >= {slice_[0] for slice_ in one["slices"]}


def test_charts_are_data() -> None:
    for name, chart in charts().items():
        assert chart["$schema"] == "https://vega.github.io/schema/vega-lite/v6.json", name
        assert chart["description"].endswith("."), name


def test_a_notebook_shows_the_answer_without_scripts() -> None:
    said = summary_html(PAGES["hostile"]().result, top=5)
    assert "<script" not in said and "<img" not in said
    page = pipelined()
    said = summary_html(page.result, top=2)
    assert "dp:2,tp:4 remat=dots" in said and "(script)" in said
    assert "more plans behind these" in said
    (best, *_) = (row for row in plan_rows(page.result) if row["rank"])
    assert best["versus"] and f">{best['versus']}<" in said


def test_a_gain_is_predicted_only_from_predictions() -> None:
    """Measured times are compared in fresh processes alone."""
    measured = [one for one in pipelined().result.candidates if isinstance(one.outcome, Measured)]
    assert len(measured) >= 2 and _predicted_gain(measured[0], measured[1]) is None
    ranked = [one for one in PAGES["slice"]().result.candidates if one.standing.ratio]
    assert _predicted_gain(ranked[0], ranked[1]) == ranked[1].standing.ratio


def test_a_measured_row_has_its_interval() -> None:
    page = pipelined()
    known = {str(one.plan): one.outcome for one in page.result.candidates}
    rows = [row for row in plan_rows(page.result) if isinstance(known[row["plan"]], Measured)]
    assert rows
    for row in rows:
        assert 0.0 < row["low_s"] < row["step_s"] < row["high_s"]


@pytest.mark.parametrize(("name", "evidence"), [("dense_lm", "estimated"), ("slice", "compiled")])
def test_time_is_split_by_cause_for_the_best_plans_in_their_order(name: str, evidence: str) -> None:
    page = PAGES[name]()
    causes = document_of(page)["causes"]
    ranked = [row["plan"] for row in plan_rows(page.result) if row["rank"]]
    plans = list(dict.fromkeys(one["plan"] for one in causes))
    of_ranked = [one for one in ranked if one in plans]
    assert of_ranked and plans[: len(of_ranked)] == of_ranked
    assert [one["order"] for one in causes] == sorted(one["order"] for one in causes)
    assert causes[0]["evidence"] == evidence
    assert all(one["seconds"] >= 0 for one in causes)
