"""The benchmark of plans over DCN on made-up records: what it finds wrong, and that it goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import VisitAnswer
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.tuner.measure.schedule import Calibration
from benchmarks.dcn_sweep.command import main
from benchmarks.dcn_sweep.figures import over_dcn, prices, summary
from benchmarks.dcn_sweep.hosts import why_not
from benchmarks.dcn_sweep.sweep import CASES, Case, Row, Table, alone_of
from benchmarks.support.paths import ROOT

LOSSES = (5.5, 5.25, 5.0)
FACTS = (
    *(("batch", 48), ("d_model", 48), ("num_experts", 8), ("num_kv_heads", 4)),
    ("num_layers", 2),
)
DENSE, MOE, PIPELINE = CASES
WHY_NO_HOSTS = why_not()


def plans_of(case: Case, folder: Path) -> tuple[Plan, ...]:
    """All legal plans of a case, for a step like those of the examples."""
    path = folder / "space.toml"
    path.write_text(case.space, encoding="utf-8")
    space = read_space(str(path))
    facts = StepFacts(
        facts=FACTS, used_axes=space.names, knobs=(("microbatches", 1),), takes_any_knob=False
    )
    return find_legal(space, facts, num_devices=8, num_granules=2, platform="cpu").legal


def row(mesh: str, *rounds_s: float, losses: tuple[float, ...] = LOSSES) -> Row:
    plan = Plan(axes=parse_mesh(mesh))
    first = VisitAnswer(
        samples_s=(0.1,),
        losses=losses,
        loss_dtype="float32",
        values="user",
        setup_s=1.0,
        peak_bytes=0,
        fingerprint=mesh,
    )
    return Row(
        plan=plan,
        first=Calibration(plan=plan, steps=1, samples=1, visit_s=1.0, first=first),
        rounds_s=rounds_s,
    )


def table_of(folder: Path, *rows: Row) -> Table:
    return Table(
        path=folder / "dense_lm.json",
        header={"schema": 1},
        rows={str(one.plan): one for one in rows},
        alone={str(alone_of(one.plan)): LOSSES for one in rows},
    )


GOOD = (
    row("dcn.tp:2,dp:4", 0.30, 0.32, 0.31),
    row("dcn.dp:2,dp:2,tp:2", 0.10, 0.11, 0.10),
    row("dcn.fsdp:2,fsdp:2,tp:2", 0.2, 0.2, 0.2),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_axis_lies_over_dcn_in_some_plan(case: Case, tmp_path: Path) -> None:
    plans = plans_of(case, tmp_path)
    assert {name for plan in plans for name in over_dcn(plan)} == {*case.over}
    sizes = {str(alone_of(plan)) for plan in plans if case.asked not in over_dcn(plan)}
    both = [plan for plan in plans if case.asked in over_dcn(plan) and str(alone_of(plan)) in sizes]
    assert both  # What has no other plan to be compared with has no ratio.


def test_dense_plans_are_all_splits(tmp_path: Path) -> None:
    """2 granules to one of three axes, 4 devices to three; tp:8 alone exceeds the key heads."""
    assert len(plans_of(DENSE, tmp_path)) == 3 * 6 - 1


def test_tp_over_dcn_is_compared_with_tp_inside_at_equal_sizes(tmp_path: Path) -> None:
    (price,) = prices(GOOD, "tp")
    assert (price.over, price.inside) == ("dcn.tp:2,dp:4", "dcn.dp:2,dp:2,tp:2")
    assert price.ratio == pytest.approx(3.0, rel=0.05)
    assert 1.0 < price.low < price.ratio < price.high
    figures, faults = summary(DENSE, table_of(tmp_path, *GOOD))
    assert faults == []
    assert figures["over_dcn"] == {"dp": 1, "fsdp": 1, "tp": 1}
    assert (figures["pairs"], figures["slower"], figures["losses_equal"]) == (1, 1, 3)


def test_what_is_not_shown_to_be_slower_is_a_fault(tmp_path: Path) -> None:
    tied = row("dcn.tp:2,dp:4", 0.10, 0.11, 0.105)
    _, faults = summary(DENSE, table_of(tmp_path, tied, *GOOD[1:]))
    assert [fault.partition(":")[0] for fault in faults] == ["dcn.tp"]
    assert "was not shown to be slower than dcn.dp:2,dp:2,tp:2" in faults[0]


@pytest.mark.parametrize(
    "losses", [(5.5, 5.25, 5.0 * (1 + 2e-5)), (5.5, 5.25), (5.5, 5.25, math.nan), ()]
)
def test_other_losses_are_a_fault(losses: tuple[float, ...], tmp_path: Path) -> None:
    other = row("dcn.fsdp:2,fsdp:2,tp:2", 0.2, 0.2, losses=losses)
    figures, faults = summary(DENSE, table_of(tmp_path, *GOOD[:2], other))
    assert len(faults) == 1
    assert faults[0].startswith("the losses of dcn.fsdp:2,fsdp:2,tp:2 are ")
    assert figures["losses_equal"] == 2


def test_what_failed_or_was_left_out_is_a_fault(tmp_path: Path) -> None:
    failed = replace(GOOD[2], failure="rank 1 on local-2: out of memory", first=None, rounds_s=())
    _, faults = summary(DENSE, table_of(tmp_path, *GOOD[:2], failed))
    assert faults == [
        "dcn.fsdp:2,fsdp:2,tp:2 failed: rank 1 on local-2: out of memory",
        "fsdp was never measured over DCN",
    ]
    _, chosen = summary(DENSE, table_of(tmp_path, *GOOD[:2]), is_whole=False)
    assert chosen == []


def test_figures_are_json_even_of_a_single_round(tmp_path: Path) -> None:
    single = [replace(one, rounds_s=one.rounds_s[:1]) for one in GOOD]
    other = replace(single[2], first=None)
    figures, faults = summary(DENSE, table_of(tmp_path, *single[:2], other))
    assert len(faults) == 1  # A single round shows nothing.
    text = json.dumps(figures, allow_nan=False)
    assert json.loads(text)["ratios"][0]["high"] is None


def test_a_record_is_gone_on_with_and_failures_are_tried_again(tmp_path: Path) -> None:
    table = table_of(tmp_path, *GOOD[:2])
    table.put(replace(GOOD[2], failure="it was killed", first=None, rounds_s=()))
    kept = Table.open(table.path, {"schema": 1})
    assert list(kept.rows.values()) == [*GOOD[:2]]
    assert kept.alone == table.alone
    assert Table.open(table.path, {"schema": 2}).rows == {}


def test_a_network_that_cannot_be_limited_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["--network-gbit", "1"])
    assert "not installed: unshare, nsenter, ip, tc" in capsys.readouterr().err


def test_records_of_another_network_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "dense_lm.json"
    Table(path=path, header={"network_gbit": None}, rows={str(GOOD[0].plan): GOOD[0]}).save()
    assert Table.open(path, {"network_gbit": None}).rows
    assert not Table.open(path, {"network_gbit": 1.0}).rows


@pytest.mark.slow
@pytest.mark.skipif(WHY_NO_HOSTS != "", reason=WHY_NO_HOSTS)
def test_two_hosts_with_a_link_between_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.dcn_sweep", "--network-gbit", "1"]
    command += ["--case", "dense_lm", "pipeline", "--mesh", "dcn.dp:2,dp:4", "dcn.pp:2,dp:4"]
    command += ["--rounds", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["network_gbit"] == 1.0
    assert found["dense_lm"]["losses_equal"] == found["dense_lm"]["plans"] == 1
    # Stages send to the other host, not to their own.
    assert found["pipeline"]["losses_equal"] == found["pipeline"]["plans"] == 1
    served = [log.read_text() for log in (tmp_path / "1gbit" / "hosts").glob("agent-*.log")]
    assert sorted(text.split()[1] for text in served) == ["host-a", "host-b"]
