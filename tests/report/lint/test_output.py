"""A lint as text, JSON and SARIF."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from automesh.answers import Lint
from automesh.cost.terms import Cure, Finding
from automesh.report.findings import RULES
from automesh.report.lint.change import change_of
from automesh.report.lint.nouns import Linted, LintReport, Tried
from automesh.report.lint.sarif import to_sarif

MIB = float(1 << 20)
FOUND = Linted(
    rule="microbatch-reshape",
    title="microbatch reshape",
    plan="dp:8",
    plans=2,
    array="f32[64,128,512]",
    axes=("dp",),
    source="train.py:18",
    file="src/train.py",
    line=18,
    what="the reshape lets dp split the microbatches",
    why="a reshape keeps the devices in order",
    cure="reshape and swap",
    bytes=8 * MIB,
    count=4.0,
    seconds=1e-3,
    tried=Tried(
        change="x.reshape(64 // n, n, 128, 512).swapaxes(0, 1)",
        memory_bytes=(15 * MIB, 7.5 * MIB),
        step_s=(3e-3, 1e-3),
        is_gone=True,
    ),
)
REPORT = LintReport(
    script="train.py",
    workload="train",
    target="cpu-8",
    device="cpu",
    device_count=8,
    plans=("dp:8", "dp:4,tp:2", "tp:8"),
    findings=(
        FOUND,
        replace(FOUND, rule="lost-donation", array="args[1]", file="", source="", line=0,
                axes=(), count=1.0, seconds=0.0, tried=None, plans=1),
    ),
    smaller=3,
    missing=(("sp:8", "it could not be lowered"),),
    notices=("a notice",),
    speeds="rough figures",
)  # fmt: skip
# What a viewer needs of https://json.schemastore.org/sarif-2.1.0.json.
TEXT = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
}
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs", "$schema"],
    "additionalProperties": False,
    "properties": {
        "version": {"const": "2.1.0"},
        "$schema": {"type": "string"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "rules"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id"],
                                            "properties": {
                                                "shortDescription": TEXT,
                                                "fullDescription": TEXT,
                                                "help": TEXT,
                                            },
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message", "ruleId", "ruleIndex"],
                            "properties": {
                                "message": TEXT,
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "partialFingerprints": {
                                    "type": "object",
                                    "additionalProperties": {"type": "string"},
                                },
                                "locations": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "physicalLocation": {
                                                "type": "object",
                                                "required": ["artifactLocation", "region"],
                                                "properties": {
                                                    "artifactLocation": {
                                                        "type": "object",
                                                        "properties": {
                                                            "uri": {
                                                                "type": "string",
                                                                "format": "uri-reference",
                                                            }
                                                        },
                                                    },
                                                    "region": {
                                                        "type": "object",
                                                        "properties": {
                                                            "startLine": {
                                                                "type": "integer",
                                                                "minimum": 1,
                                                            }
                                                        },
                                                    },
                                                },
                                            }
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_the_text_names_line_rule_cost_and_what_the_cure_saves() -> None:
    text = Lint(found=REPORT).text(width=80)
    first = "src/train.py:18: microbatch-reshape: f32[64,128,512], 8.00 MiB x 4 on a device"
    assert first in text and "over dp, 1.00 ms of a step" in text
    together = " ".join(text.split())
    assert "saves 7.50 MiB of 15.0 MiB and 2.00 ms of 3.00 ms (estimated)" in together
    assert (
        "dp:8, and 1 more of 3" in together and "2 findings; 3 smaller ones not shown" in together
    )
    assert "missing sp:8: it could not be lowered" in together
    assert together.splitlines()[0].split(", ")[1].startswith("3 plans")
    alone = Lint(found=replace(REPORT, plans=REPORT.plans[:1])).text(width=80)
    assert f", mesh {REPORT.plans[0]}" in " ".join(alone.split())


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_text_fits_but_for_the_lines_that_tools_read(width: int) -> None:
    lines = Lint(found=REPORT).text(width=width).splitlines()
    assert max(len(line) for line in lines if line.startswith(" ")) <= width


def test_a_cure_that_costs_time_says_so() -> None:
    tried = replace(FOUND.tried, step_s=(1e-3, 2e-3), is_gone=False) if FOUND.tried else None
    report = replace(REPORT, findings=(replace(FOUND, tried=tried),))
    together = " ".join(Lint(found=report).text(width=100).split())
    assert "saves 7.50 MiB of 15.0 MiB and costs 1.00 ms of 1.00 ms (estimated); a part" in together


def test_nothing_found_is_said() -> None:
    text = Lint(found=replace(REPORT, findings=(), smaller=0)).text(width=80)
    assert "found nothing" in " ".join(text.split())


def test_json_is_strict_and_has_what_the_docstring_says() -> None:
    data = json.loads(json.dumps(Lint(found=REPORT).to_json(), allow_nan=False))
    first, second = data["findings"]
    assert data["schema"] == 1 and data["missing"] == [
        {"plan": "sp:8", "why": "it could not be lowered"}
    ]
    assert first["tried"]["memory_bytes"] == [15 * MIB, 7.5 * MIB] and first["line"] == 18
    assert (second["tried"], second["file"], second["line"], second["seconds"]) == (None,) * 4


def test_sarif_is_what_viewers_read() -> None:
    data = to_sarif(REPORT)
    jsonschema.validate(data, SARIF)
    (run,) = data["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == list(RULES)
    first, second = run["results"]
    assert rules[first["ruleIndex"]] == first["ruleId"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "src/train.py" and place["region"]["startLine"] == 18
    assert (first["level"], second["level"]) == ("warning", "error") and "locations" not in second
    broken = json.loads(json.dumps(data))
    del broken["runs"][0]["results"][0]["message"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SARIF)


@pytest.mark.parametrize(
    ("cure", "expected"),
    [
        (Cure(kind="donate"), "donate_argnums=(0, 2)"),
        (Cure(kind="split-like", splits=((("fsdp",), ()),)), "P('fsdp', None)"),
        (
            Cure(kind="hops", splits=((("a",), ()), ((), ("a",)), ((), ("a", "b")))),
            "to P(None, 'a') first, then to P(None, ('a', 'b'))",
        ),
        (Cure(kind="interleave", shape=(64, 8)), "x.reshape(64 // n, n, 8).swapaxes(0, 1)"),
        (Cure(kind="interleave", shape=(64,)), "x.reshape(64 // n, n).swapaxes(0, 1)"),
        (Cure(kind="constrain-carried", splits=(((), ("tp",)),)), "P(None, 'tp')"),
        (Cure(kind="convert-back"), ".astype(...)"),
        (Cure(kind="return-as-given"), "out_shardings"),
    ],
)
def test_a_cure_is_said_as_one_writes_it(cure: Cure, expected: str) -> None:
    found = Finding(
        rule="replicated-state", array="args[0]['w']", bytes=(), detail="args[0], args[2]"
    )
    assert expected in change_of(found, cure)
