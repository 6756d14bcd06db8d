"""Explanations at every width: golden files, nothing cut, JSON, and the words of the evidence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from automesh.answers import Account
from automesh.mesh.axes import Plan, parse_mesh
from automesh.report.explain.nouns import Explanation
from automesh.report.explain.words import _replayed_sentence, verdict_sentence
from tests.support.cases import explain_golden
from tests.support.cases.explain_golden import CASES, FOLDER, SAMPLES
from tests.support.samples.results_samples import measured

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """`python -m tests.regenerate.update_golden` writes them."""
    text = CASES[name]()
    assert text == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert max(cell_len(line) for line in text.splitlines()) <= int(name.split("_")[1])
    assert "…" not in text


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [70, 80, 90])
def test_lines_of_code_are_named_in_one_piece(name: str, width: int) -> None:
    explanation = SAMPLES[name]()
    rows = [
        replace(row, source="transformer.py:162", operand="bf16[768,2048]", count=7240.0)
        for row in explanation.one.cost.collectives
    ]
    cost = replace(explanation.one.cost, collectives=tuple(rows))
    longer = replace(explanation, one=replace(explanation.one, cost=cost))
    text = Account(found=longer).text(width=width, colour=False)
    assert not re.search(r"transformer(?!\.py:162)", text)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [48, 60, 64])
def test_where_there_is_little_room_names_are_folded_and_figures_are_not(
    name: str, width: int
) -> None:
    explanation = SAMPLES[name]()
    rows = [
        replace(row, source="multihead_latent_attention.py:162", ici_s=0.0407)
        for row in explanation.one.cost.collectives
    ]
    cost = replace(explanation.one.cost, collectives=tuple(rows))
    changed = replace(explanation, one=replace(explanation.one, cost=cost))
    text = Account(found=changed).text(width=width, colour=False)
    assert not re.search(r"\b40\.[78](?! ms)", text)
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_golden_folder_has_no_other_files() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", SAMPLES)
def test_colour_changes_no_text(name: str) -> None:
    account = Account(found=SAMPLES[name]())
    plain, coloured = (account.text(width=80, colour=on) for on in (False, True))
    assert [line.rstrip() for line in ANSI.sub("", coloured).splitlines()] == plain.splitlines()
    assert "\x1b" not in plain


def test_only_characters_that_have_an_ascii_stand_in() -> None:
    from automesh.cli.guard import _ASCII  # pyright: ignore[reportPrivateUsage]

    text = "".join(case() for case in CASES.values())
    assert {char for char in text if ord(char) > 127} <= set(_ASCII)


@pytest.mark.parametrize("name", SAMPLES)
def test_json_is_strict_and_complete(name: str) -> None:
    explanation = SAMPLES[name]()
    data = json.loads(json.dumps(Account(found=explanation).to_json(), allow_nan=False))
    assert data["schema"] == 1
    one = data["one"]
    assert sum(cause["seconds"] for cause in one["causes"]) == pytest.approx(
        one["step_s"]["estimated"]
    )
    assert sum(reason["seconds"] for reason in one["reasons"]) == pytest.approx(
        one["step_s"]["estimated"]
    )
    assert (data["against"] is None) == (data["changes"] is None) == (explanation.against is None)
    assert len(one["collectives"]) == len(explanation.one.cost.collectives)


def sides(first_s: float, second_s: float, *, half: float = 0.001) -> Explanation:
    """The estimate has the second mesh win by far."""
    explanation = explain_golden.against()
    assert explanation.against is not None
    return replace(
        explanation,
        one=replace(explanation.one, measured=measured(first_s, half=half)),
        against=replace(explanation.against, measured=measured(second_s, half=half)),
    )


def test_what_was_measured_comes_first() -> None:
    said = verdict_sentence(sides(2.0, 1.0))
    assert said.startswith("Measured, fsdp:16 is 2.00x faster. By the estimate, fsdp:16 is ")


def test_an_estimate_that_the_clock_contradicts_explains_nothing() -> None:
    said = verdict_sentence(sides(1.0, 2.0))
    assert said.startswith(
        "Measured, dcn.tp:4,fsdp:4 is 2.00x faster: the estimate has it the other way round and "
        "does not explain it."
    )


def test_times_inside_the_noise_are_a_tie() -> None:
    assert verdict_sentence(sides(1.0, 1.01, half=0.02)).startswith(
        "Measured, they are not told apart"
    )


def test_a_mesh_against_itself_has_no_winner() -> None:
    explanation = explain_golden.estimated()
    same = replace(explanation, against=explanation.one)
    assert (
        verdict_sentence(same) == "By the estimate, both take the same time for the same reasons."
    )


def _side(plan: str, estimated_s: float, **causes: float) -> Any:
    named = tuple((cause.replace("_", " "), seconds) for cause, seconds in causes.items())
    return SimpleNamespace(
        plan=Plan(axes=parse_mesh(plan, ("dp", "fsdp", "tp"))),
        estimated=SimpleNamespace(step_s=estimated_s),
        replay=SimpleNamespace(step_s=sum(causes.values()), causes=named),
    )


def test_what_replays_differ_by_most_is_named_with_both_figures() -> None:
    fast = _side("dp:8", 1.0, compute=1.0, ici_dp=0.1)
    slow = _side("tp:8", 2.0, compute=1.1, ici_dp=0.1, ici_tp=1.0)
    for sides in ((fast, slow), (slow, fast)):
        assert _replayed_sentence(sides) == (
            "Replayed, dp:8 is 2.00x faster: tp:8 spends most of the difference on waiting for "
            "collectives over tp inside a granule (1.00 s against 0.00 ns)."
        )
    other = _side("fsdp:8", 0.5, compute=1.104)
    assert _replayed_sentence((fast, other)) == "Replayed, they take the same time."
    wrong = _side("tp:8", 0.5, compute=1.5, ici_dp=0.7)
    assert _replayed_sentence((fast, wrong)).endswith(
        "spends most of the difference on waiting for collectives over dp inside a granule "
        "(700 ms against 100 ms); the estimate has it the other way round and does not explain it."
    )
