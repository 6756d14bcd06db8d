"""Terms of a study that read well, and that fit neither its plans nor each other."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automesh import api
from automesh.errors import UsageError
from tests.tuner.explain.test_study import make_study

Change = Callable[[dict[str, Any]], None]


def _far_power(terms: dict[str, Any]) -> None:
    terms["kernels"][0]["bytes"] = [{"coefficient": 1.0, "powers": [["tp", 2**62]]}]


def _no_number(terms: dict[str, Any]) -> None:
    terms["argument_bytes"] = [{"coefficient": float("nan"), "powers": []}]


def _no_axis(terms: dict[str, Any]) -> None:
    terms["kernels"][0]["bytes"] = [{"coefficient": 1.0, "powers": [["nobody", 1]]}]


def _no_region(terms: dict[str, Any]) -> None:
    terms["kernels"][0]["region"] = 10**6


def _endless(terms: dict[str, Any]) -> None:
    terms["kernels"][0]["count"] = [{"coefficient": float("inf"), "powers": []}]


CHANGES: dict[str, Change] = {
    "a far power": _far_power,
    "no number": _no_number,
    "no axis of the step": _no_axis,
    "no region of the step": _no_region,
    "an endless count": _endless,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_calculated_is_said(name: str, tmp_path: Path) -> None:
    study = make_study(tmp_path / "train-gpu-h100-16-0123abcd")
    for file in (study / "terms").glob("*.json"):
        kept = json.loads(file.read_text())
        CHANGES[name](kept["propagation"]["terms"])
        file.write_text(json.dumps(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            api.explain(study, "fsdp:4,tp:4")
        except UsageError as error:
            assert "the terms of the study in" in error.message
            assert "are damaged: " in error.message
            assert "terms`, and run its search again" in error.hint
            said = error.message
        else:
            said = ""
        text = api.write_report(study).read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', text)
    assert found
    # A browser reads no `NaN`.
    page = json.loads(found[1], parse_constant=pytest.fail)
    # All else of the study is on its page.
    assert len(page["plans"]["rows"]) == 7
    assert len(page["explained"]) == 6 or said
    assert page["explained"] or "are damaged: " in page["left_out"]["explained"]
