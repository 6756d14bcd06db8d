"""What a search for absent devices prints and writes: predicted, never measured."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from automesh.answers import Result
from automesh.errors import NoFeasibleMesh
from automesh.mesh.evidence import Evidence, ProgramFacts
from automesh.mesh.rules.file import read_rules
from automesh.outcomes import Compiled, OutOfMemory
from automesh.report import words
from automesh.report.blocks.terminal import render
from automesh.report.files.csv import dataframe
from automesh.report.files.rule import config_of, rule_of, save_rule
from automesh.report.predicted import exposed_s, exposed_sentence
from automesh.report.table import report_of
from tests.support.samples.changed_results import changed
from tests.support.samples.results_samples import GIB, measured_search, predicted_search, replayed


def test_a_rule_rests_on_the_replay() -> None:
    evidence = rule_of(predicted_search()).evidence
    assert evidence == Evidence(
        kind="compiled",
        step_s=0.412,
        bracket_s=replayed(0.412).bracket_s,
        exposed_s=pytest.approx(0.17 * 0.412),
        hbm_bytes=14 * GIB,
        reserve_bytes=GIB // 4,
        mfu=pytest.approx(0.42),
        runner_up=replace(
            evidence.runner_up, plan="dcn.dp:2,dcn.fsdp:2,fsdp:64,tp:2 remat=full microbatches=4"
        ),
        tried=(
            ("enumerated", 4950),
            ("ruled_out", 4800),
            ("out_of_memory", 1),
            ("compiled", 4),
        ),
        study="moe_lm-tpu-v5p-1024-4-77aa01",
        made="2026-11-21T08:07:00Z",
        # The compiler of other devices does not matter for these.
        versions=(("automesh", "0.1.0"), ("jax", "0.10.2"), ("libtpu", "0.0.42.1")),
        environment=(("LIBTPU_INIT_ARGS", "--xla_x=1"),),
        program=ProgramFacts(
            fingerprint="ab12cd34",
            flops=81_000_000_000,
            peak_bytes=14 * GIB,
            undonated_bytes=0,
            step_s=0.412,
            collectives=(
                ("all-gather fsdp", 12, 12_000_000),
                ("all-reduce dp+fsdp", 1, 4_000_000),
            ),
        ),
    )


def test_a_rule_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for name in ("rules.toml", "rules.json"):
        path = save_rule(predicted_search(), tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Other versions are installed here.
            config = read_rules(path).select("tpu-v5p-1024-4")
            assert config == config_of(predicted_search())
    assert 'kind = "compiled"' in (tmp_path / "rules.toml").read_text()
    assert "measured" not in (tmp_path / "rules.toml").read_text()


def test_a_measured_rule_replaces_all_of_a_compiled_one(tmp_path: Path) -> None:
    path = save_rule(changed(predicted_search(), target="cpu-8"), tmp_path / "rules.toml")
    save_rule(measured_search(), path)
    text = path.read_text()
    assert text.count("[[rule]]") == 1
    assert 'kind = "measured"' in text
    assert "bracket_s" not in text and "exposed_s" not in text and "reserve_bytes" not in text


@pytest.mark.parametrize("change", ["here", "low", "not replayed"])
def test_nothing_less_than_a_replay_becomes_a_rule(change: str) -> None:
    result = predicted_search()
    best = result.candidates[0]
    assert isinstance(best.outcome, Compiled)
    if change == "here":
        result = replace(result, is_ahead=False)
    else:
        changed = {"effort": "low"} if change == "low" else {"replay": None}
        best = replace(best, outcome=replace(best.outcome, **changed))
        result = replace(result, candidates=(best, *result.candidates[1:]))
    with pytest.raises(NoFeasibleMesh):
        rule_of(result)


def test_where_nothing_fits_it_is_said_what_to_do() -> None:
    result = predicted_search()
    fallen = tuple(one for one in result.candidates if isinstance(one.outcome, OutOfMemory))
    funnel = replace(result.funnel, compiled=0, screened=0, waiting=0, out_of_memory=150)
    with pytest.raises(NoFeasibleMesh, match=r"fits: .*needs 131 GiB of 95.8 GiB") as raised:
        rule_of(replace(result, candidates=fallen, funnel=funnel))
    assert "more devices" in raised.value.hint


def test_no_sentence_says_that_anything_was_measured() -> None:
    result = predicted_search()
    said = render(report_of(result, top=10), width=120, colour=False)
    assert "predicted" in said
    assert "measured" not in said.replace("not measured", "")
    assert "131 GiB of 95.8 GiB, of which 256 MiB stay in reserve" in said
    assert "predicted 3.59x faster than the script's dcn.fsdp:4,fsdp:128" in said
    assert words.funnel_sentence(result.funnel) == (
        "4950 plans: 4 compiled, 4800 ruled out, 1 out of memory, 1 compiled at low effort only, "
        "140 estimated only, 4 not reached"
    )


def test_exposed_communication_is_what_the_cores_wait_for() -> None:
    replay = replayed(1.0)
    assert exposed_s(replay) == pytest.approx(0.17)
    assert exposed_sentence(replay) == (
        "170 ms (17 % of the step) of 700 ms of communication is exposed: ici tp 120 ms, "
        "dcn dp 50.0 ms"
    )
    hidden = replace(replay, causes=(("compute", 1.0),))
    assert exposed_sentence(hidden) == "all of 700 ms of communication is hidden behind other work"
    assert exposed_sentence(replace(hidden, communication_s=())) == "there is no communication"


def test_json_and_csv_hold_the_replays() -> None:
    data = Result(found=predicted_search()).to_json()
    json.dumps(data, allow_nan=False)
    assert data["best"]["evidence"] == "compiled"
    assert data["best"]["bracket_s"] == list(replayed(0.412).bracket_s)
    assert data["best"]["exposed_s"] == pytest.approx(0.17 * 0.412)
    assert data["best"]["mfu"] == pytest.approx(0.42)
    assert (data["device_memory_bytes"], data["reserve_bytes"]) == (383 * GIB // 4, GIB // 4)
    assert data["candidates"][0]["outcome"]["replay"]["step_s"] == 0.412
    assert data["funnel"]["screened"] == 1
    table = dataframe(predicted_search())
    assert list(table["effort"].dropna()) == ["default"] * 4 + ["low"]
    assert table["predicted_s"].notna().sum() == 4
    assert table["exposed_s"].notna().sum() == table["mfu"].notna().sum() == 4
    assert table["step_low_s"].iloc[0] == pytest.approx(0.7 * 0.412)
