"""The benchmark of published results: reading, mapping and statistics; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.axes import parse_mesh
from automesh.space.spec import read_space
from benchmarks.published.command import RESULTS, Predicted, described, verdict
from benchmarks.published.groups import (
    Figures,
    Group,
    Record,
    config_of,
    figures,
    groups_of,
    read_records,
    target_of,
)
from benchmarks.support.models import DENSE, MOE, Unlike
from tests.support.example_runs import module

GROUPS, OTHERS = groups_of(read_records(RESULTS))
BY_NAME = {group.name: group for group in GROUPS}
DENSE_GROUP = BY_NAME["maxtext_parity/qwen3-0.6b/4xTPU7x/engine/ga1"]
EXPERTS_GROUP = BY_NAME["maxtext_parity/qwen3.5-35b-a3b/4xTPU7x/engine/ga1"]
VISION_GROUP = BY_NAME["jax_toolbox/vit-g14/32xA100/gbs4096"]


def record(**changes: object) -> Record:
    usual = Record(
        id="x/1",
        framework="MaxText/engine",
        group="x/g",
        status="ok",
        model={"name": "qwen3-0.6b"},
        hardware={"chip": "TPU7x", "count": 4},
        parallelism={"dp": 8},
        batch={"global_batch": 8, "grad_accum": 1, "seq_len": 1024},
        measured={"step_time_s": 0.05},
        precision="fp32",
        remat="none",
        group_class="strict",
        extra={"topology": "2x2x1"},
    )
    return replace(usual, **changes)


def test_all_shipped_groups_are_represented() -> None:
    assert not OTHERS
    assert {group.target for group in GROUPS} == {"7x:2x2x1", "gpu-a100-80gb-32"}
    assert (DENSE_GROUP.model.script, EXPERTS_GROUP.model.script) == (DENSE, MOE)


def test_layouts_are_plans_of_the_target() -> None:
    meshes = {one.plan.mesh for one in EXPERTS_GROUP.configs}
    assert meshes == {"fsdp:8", "fsdp:4,tp:2", "ep:4,tp:2", "ep:8"}
    # Between machines of eight, the outer axis comes first.
    assert [one.plan.mesh for one in VISION_GROUP.configs] == [
        "dcn.dp:4,dp:8",
        "dcn.dp:4,dp:2,tp:4",
        "dcn.dp:4,tp:8",
    ]
    assert dict(VISION_GROUP.configs[0].plan.knobs)["microbatches"] == 8


def test_what_differs_is_said() -> None:
    ring = [one for one in EXPERTS_GROUP.configs if one.kernel]
    assert len(ring) == 4 and all("kernels" in one.causes[0] for one in ring)
    assert any("linear attention" in remark for remark in EXPERTS_GROUP.remarks)
    assert (DENSE_GROUP.optimizer, EXPERTS_GROUP.optimizer) == ("adamw", "sgd")
    assert any("of some is sgd there, adamw here" in remark for remark in DENSE_GROUP.remarks)
    assert not any("optimizer" in remark for remark in EXPERTS_GROUP.remarks)
    ((left_out, reason),) = DENSE_GROUP.left_out
    assert left_out.startswith("maxtext_parity/") and "ZeRO" in reason
    often = BY_NAME["maxtext_parity/qwen3-0.6b/4xTPU7x/noted/ga8"].configs
    assert ["reduction frequency" in " ".join(one.causes) for one in often] == [True, False, False]
    # Once per step either way.
    assert not any(one.causes for one in DENSE_GROUP.configs)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_arguments_and_spaces_are_those_of_the_examples(group: Group, tmp_path: Path) -> None:
    sizes = module(Path(group.model.script).stem).SIZES
    options = dict(zip(group.argv[::2], group.argv[1::2], strict=True))
    assert options["--size"] in sizes
    assert int(options["--length"]) % int(options["--chunk"]) == 0
    path = tmp_path / "space.toml"
    path.write_text(group.space)
    space = read_space(str(path))
    knobs = {knob.name: knob.values for knob in space.knobs}
    for one in group.configs:
        assert all(value in knobs[name] for name, value in one.plan.knobs)
        listed = {axis.name for axis in space.axes}
        assert {axis.name for axis in one.plan.axes if axis.size > 1} <= listed
        assert [axis.name for axis in one.plan.axes] == list(space.names)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallelism": {"dp": 4, "pp": 2}}, "pipelines"),
        ({"parallelism": {"dp": 8, "zero_stage": 1}}, "ZeRO"),
        ({"parallelism": {"dp": 4, "cp": 2}}, "`cp`"),
        ({"parallelism": {"dp": 4}}, "not one of 8 devices"),
        ({"parallelism": {"ep": 8}}, "splits experts"),
        ({"status": "oom", "measured": {}}, "no time: oom"),
    ],
)
def test_records_that_are_no_plans_say_why(changes: dict[str, object], reason: str) -> None:
    target, absent = target_of(record())
    assert target == "7x:2x2x1"
    with pytest.raises(Unlike, match=reason):
        config_of(record(**changes), absent, DENSE_GROUP.model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "Megatron-LM"}, "no JAX program"),
        ({"group_class": "weak_scaling"}, "more than their layout"),
        ({"model": {"name": "nobody"}}, "sizes of `nobody`"),
        ({"hardware": {"chip": "T4", "count": 16}}, "no target"),
        ({"parallelism": {"dp": 4, "pp": 2}}, "fewer than two"),
        ({"batch": {"grad_accum": 1, "seq_len": 1024}}, "batch"),
    ],
)
def test_groups_that_cannot_be_represented_say_why(changes: dict[str, object], reason: str) -> None:
    one = record(**changes)
    groups, others = groups_of([one, replace(one, id="x/2")])
    assert not groups
    assert len(others) == 1 and reason in others[0][1]


def test_files_of_another_format_are_told_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"records": [{"id": 3}]}')
    with pytest.raises(UsageError, match=r"records\.0"):
        read_records(path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="no list `records`"):
        read_records(path)


def test_figures_of_a_perfect_and_of_a_reversed_order() -> None:
    measured = [1.0, 2.0, 3.0]
    right = figures(measured, [2.0, 4.0, 6.0])
    assert (right.kendall_tau, right.top1_regret, right.top1_regret_worst) == (1.0, 0.0, 0.0)
    assert (right.configs, right.median_time_error) == (3, 1.0)
    wrong = figures(measured, [3.0, 2.0, 1.0])
    assert wrong.kendall_tau == -1.0
    assert wrong.top1_regret == pytest.approx(2.0)
    assert wrong.median_time_error == pytest.approx(2 / 3)


def test_kernels_of_one_program_are_ties() -> None:
    # The same layout, with a kernel that makes it twice as fast and without.
    found = figures([1.0, 2.0, 4.0], [3.0, 3.0, 6.0])
    assert 0 < found.kendall_tau < 1.0
    assert (found.top1_regret, found.top1_regret_worst) == (0.0, 1.0)
    assert figures([1.0, 2.0], [1.0, 1.0]).kendall_tau == 0.0


TIMES = st.lists(
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)), min_size=2, max_size=8, unique=True
)


@given(TIMES)
def test_figures_stay_in_their_bounds(times: list[tuple[float, float]]) -> None:
    measured, predicted = zip(*times, strict=True)
    found = figures(measured, predicted)
    assert -1.0 - 1e-9 <= found.kendall_tau <= 1.0 + 1e-9
    assert 0.0 <= found.top1_regret <= found.top1_regret_worst
    assert figures(measured, measured).top1_regret == 0.0


def rows_of(group: Group, seconds: list[float]) -> list[Predicted]:
    return [
        Predicted(config=config, predicted_s=s, causes=(("compute", s),), failure="" if s else "?")
        for config, s in zip(group.configs, seconds, strict=True)
    ]


def test_misses_are_printed_where_they_are() -> None:
    rows = rows_of(DENSE_GROUP, [0.09, 0.09, 0.05])
    lines = described(DENSE_GROUP, rows)
    missed = [line for line in lines if "predicted before" in line]
    assert missed == ["    predicted before dp:8"]
    assert any("left out: ZeRO" in line for line in lines)
    assert any("61.0 ms (1.00x)" in line and "90.0 ms (1.80x)" in line for line in lines)


def test_verdicts_name_the_suspects() -> None:
    good = Figures(
        configs=3,
        kendall_tau=0.8,
        top1_regret=0.05,
        top1_regret_worst=0.05,
        median_time_error=0.1,
    )
    rows = rows_of(EXPERTS_GROUP, [1.0] * len(EXPERTS_GROUP.configs))
    assert verdict(EXPERTS_GROUP, good, rows) == "as aimed at"
    bad = replace(good, kendall_tau=0.1)
    said = verdict(EXPERTS_GROUP, bad, rows)
    assert 0 < said.index("`ring` there") < said.index("attention is one fused kernel")
    alike = replace(DENSE_GROUP, remarks=())
    assert "the model is wrong" in verdict(alike, bad, rows_of(DENSE_GROUP, [1.0] * 3))


def test_meshes_of_layouts_are_read_back() -> None:
    for group in GROUPS:
        for one in group.configs:
            names = [axis.name for axis in one.plan.axes]
            granules = one.plan.num_granules
            read = parse_mesh(
                one.plan.mesh, names, num_devices=one.plan.num_devices, num_granules=granules
            )
            assert read == one.plan.axes


def test_a_layout_that_ran_and_is_said_not_to_fit_counts_as_the_fastest() -> None:
    assert figures([2.0, 4.0], [1.0, 2.0]).top1_regret == 0.0
    assert figures([2.0, 4.0], [1.0, 2.0], refused_s=[1.0]).top1_regret == 1.0


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (["adamw", "adamw"], "adamw", []),
        (["sgd", "sgd"], "sgd", []),
        (["sgd", "adamw"], "adamw", ["the optimizer of some is sgd there, adamw here"]),
        (["lion", "lion"], "adamw", ["the optimizer is lion there, adamw here"]),
        (["", ""], "adamw", ["the optimizer is not on record, and adamw here"]),
    ],
)
def test_other_optimizers_are_told(theirs: list[str], ours: str, said: list[str]) -> None:
    records = [
        record(id=f"x/{number}", extra={"topology": "2x2x1", "optimizer": name})
        for number, name in enumerate(theirs)
    ]
    ((group,), _) = groups_of(records)
    assert group.optimizer == ours
    assert [remark for remark in group.remarks if "optimizer" in remark] == said
