"""The benchmark of expert presets: reading, mapping and counting; nothing is compiled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import (
    Compiled,
    Counts,
    Estimated,
    Memory,
    Outcome,
    OutOfMemory,
    ReplayOutcome,
)
from automesh.space.spec import read_space
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from benchmarks.experts.command import PRESETS, Kept, described, digest_of, left_out, summary
from benchmarks.experts.presets import (
    Expert,
    Point,
    Preset,
    Skipped,
    expert_of,
    mesh_of,
    read_presets,
    remat_of,
    sort_out,
    target_called,
)
from benchmarks.experts.study import Row, Side, Study, believed_s, difference, rank_of
from benchmarks.support.compiles import Bench
from benchmarks.support.granules import split_over_granules
from benchmarks.support.models import DENSE, LONG, MOE, SPACES, Unlike, chunk_of, model_called
from tests.support.example_runs import arguments, device_mesh, module

EXPERTS, SKIPPED = sort_out(read_presets(PRESETS))
BY_ID = {one.id: one for one in EXPERTS}


def preset(**changes: object) -> Preset:
    usual = Preset(
        id="x",
        framework="maxtext",
        model="llama3.1-8b",
        global_batch=48,
        seq_len=8192,
        remat="full",
        resolved={"tpu-v6e-16": Point(ici={"fsdp": 16}, dcn={})},
    )
    return replace(usual, **changes)


def test_enough_of_the_shipped_presets_are_represented() -> None:
    assert len(EXPERTS) >= 25
    assert len(EXPERTS) + len(SKIPPED) == len(read_presets(PRESETS))
    assert all(one.reason for one in SKIPPED)
    # What is cheap to compile comes first.
    sizes = [one.num_devices for one in EXPERTS if not one.target.startswith("gpu")]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("one", EXPERTS, ids=lambda one: one.id)
def test_every_expert_is_a_plan_of_its_target(one: Expert) -> None:
    target = parse_target(one.target, os.environ)
    assert target.absent is not None
    granules = target.absent.fabric.num_granules
    parse_mesh(one.mesh, num_devices=one.num_devices, num_granules=granules)
    assert target.absent.num_devices == one.num_devices
    assert one.script in SPACES


def test_sizes_are_those_of_the_examples() -> None:
    for one in EXPERTS:
        example = module(Path(one.script).stem)
        size, options = one.argv[1], dict(zip(one.argv[2::2], one.argv[3::2], strict=True))
        shape = example.SIZES[size].model
        assert shape.num_heads == model_called(one.model).heads
        assert int(options["--length"]) % int(options["--chunk"]) == 0


@pytest.mark.parametrize(
    ("size", "billions"),
    # As their names have it; of Qwen 3 0.6B its report says 0.596.
    [("llama2-7b", 6.74), ("llama3.1-405b", 405.85), ("qwen3-0.6b", 0.596), ("gala-1b", 1.30)],
)
def test_public_sizes_have_the_parameters_of_their_names(size: str, billions: float) -> None:
    with arguments("dense_lm", "--size", size):
        state, _ = module("dense_lm").build(device_mesh({})).args
    found = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert found / 1e9 == pytest.approx(billions, rel=0.002)


def test_presets_as_published_become_plans_as_read() -> None:
    llama = BY_ID["p239"]
    assert (llama.target, llama.mesh, llama.script) == ("tpu-v6e-16", "fsdp:16", DENSE)
    assert llama.argv[:6] == ("--size", "llama3.1-8b", "--rows", "48", "--length", "8192")
    assert BY_ID["p222"].target == "7x:4x4x4"
    assert BY_ID["p026"].mesh == "dcn.dp:2,fsdp:256"
    assert BY_ID["p246"].script == MOE and BY_ID["p246"].mesh == "fsdp:64,ep:4"
    long = BY_ID["p219"]
    assert (long.script, long.mesh) == (LONG, "fsdp:64,sp:8")
    # One mesh, laid over machines of 8 row by row.
    assert BY_ID["p020"].mesh == "dcn.dp:4,dcn.fsdp:8,fsdp:8"
    accumulating = BY_ID["p025"]
    assert accumulating.microbatches == 4
    assert accumulating.baseline == "fsdp:256 remat=full microbatches=4"


def test_space_has_the_experts_knobs_alone(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(BY_ID["p025"].space)
    space = read_space(str(path))
    assert [(knob.name, knob.values) for knob in space.knobs] == [
        ("remat", ("full",)),
        ("microbatches", (4,)),
    ]
    shipped = read_space("dense_lm")
    assert (space.axes, space.constraints) == (shipped.axes, shipped.constraints)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"resolved": {}}, "names no devices"),
        ({"model": "gpt3-175b"}, "GELU"),
        ({"model": "nobody-1b"}, "sizes of `nobody-1b`"),
        ({"seq_len": None}, "sequence length"),
        ({"resolved": {"neuron-trn2.48xlarge-64": Point(ici={"fsdp": 64})}}, "neither TPU nor"),
        ({"resolved": {"tpu-v6e-7": Point(ici={"fsdp": 7})}}, "7"),
        ({"resolved": {"tpu-v6e-16": Point(ici={"pp": 4, "fsdp": 4})}}, "pipelines"),
        ({"resolved": {"tpu-v6e-16": Point(ici={"rows": 16})}}, "`rows`"),
        ({"resolved": {"tpu-v6e-16": Point(ici={"fsdp": 8})}}, "not one of 16 devices"),
        ({"resolved": {"tpu-v6e-16": Point(ici={"fsdp": 4, "ep": 4})}}, "splits experts"),
    ],
)
def test_what_cannot_be_represented_says_why(changes: dict[str, object], reason: str) -> None:
    found = expert_of(preset(**changes))
    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_axes_of_size_one_need_no_name_of_ours() -> None:
    found = expert_of(preset(resolved={"tpu-v6e-16": Point(ici={"pp": 1, "x": 1, "fsdp": 16})}))
    assert isinstance(found, Expert) and found.mesh == "fsdp:16"


def test_the_smallest_devices_are_chosen_and_differences_remarked() -> None:
    found = expert_of(
        preset(
            resolved={
                "tpu-v6e-64": Point(ici={"fsdp": 64}),
                "tpu-v6e-16": Point(ici={"fsdp2": 16}),
                "neuron-trn2.48xlarge-64": Point(ici={"fsdp": 64}),
            },
            remat="qkv_proj_offloaded",
            other={"quantization": "fp8"},
        )
    )
    assert isinstance(found, Expert)
    assert (found.target, found.mesh, found.remat) == ("tpu-v6e-16", "fsdp:16", "full")
    assert len(found.remarks) == 3


def test_two_axes_with_one_name_of_ours_multiply() -> None:
    absent = parse_target("tpu-v6e-16", os.environ).absent
    assert absent is not None
    axes = mesh_of(Point(ici={"fsdp": 4, "fsdp2": 2, "model": 2}), absent)
    assert {axis.name: axis.size for axis in axes if axis.size > 1} == {"fsdp": 8, "tp": 2}


POWERS = st.integers(0, 4).map(lambda exponent: 2**exponent)


@given(st.fixed_dictionaries(dict.fromkeys(("dp", "fsdp", "tp"), POWERS)), POWERS)
def test_rows_of_a_mesh_keep_their_devices(mesh: dict[str, int], granule: int) -> None:
    axes = split_over_granules(mesh, granule)
    total = math.prod(mesh.values())
    if total % granule:
        assert axes is None
        return
    # Powers of two always split.
    assert axes is not None
    parts = {axis.name: axis for axis in axes}
    assert {name: parts[name].size for name in mesh} == mesh
    assert math.prod(axis.ici for axis in axes) == granule
    # Device n of the whole mesh is device n % granule of granule n // granule.
    for number in (0, total // 3, total - 1):
        ici = dcn = 0
        left, places = number, dict[str, int]()
        for name in ("tp", "fsdp", "dp"):
            left, places[name] = divmod(left, mesh[name])
        for name in ("dp", "fsdp", "tp"):
            one = parts[name]
            ici = ici * one.ici + places[name] % one.ici
            dcn = dcn * one.dcn + places[name] // one.ici
        assert dcn * granule + ici == number


def test_rows_that_do_not_end_with_machines_are_refused() -> None:
    assert split_over_granules({"dp": 8, "fsdp": 6}, 8) is None


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("full", "full"),
        ("FULL", "full"),
        ("minimal_flash", "dots"),
        ("none", "none"),
        ("save_qkv_proj", "full"),
        (None, "full"),
        ([{"policy": "checkpoint_policies.dots_saveable"}], "dots"),
        ([{"policy": {"fn": "combine_remat_policies"}}], "full"),
    ],
)
def test_remat_keeps_no_more_than_published(published: object, ours: str) -> None:
    remat, remark = remat_of(published)
    assert remat == ours
    assert bool(remark) == (published in (None, "save_qkv_proj") or "fn" in str(published))


def test_selectors_are_our_targets_or_nothing() -> None:
    assert target_called("tpu-v5litepod-256-4") == "tpu-v5litepod-256-4"
    assert target_called("gpu-a4-highgpu-8g(B200)-256") == "gpu-a4-highgpu-8g-256"
    assert target_called("neuron-trn2.48xlarge-64") == target_called("<default>") == ""


def test_scores_take_a_gibibyte_at_most() -> None:
    model = model_called("llama3.1-8b")
    for tokens in (1, 4096, 8192, 30_000, 10**7):
        chunk = chunk_of(model, tokens)
        assert chunk == 128 or 4 * model.heads * tokens * chunk <= 2**30
    with pytest.raises(Unlike):
        model_called("")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("{}", "no list `presets`"),
        ('{"presets": [{"id": "a"}]}', "presets.0.framework"),
        (
            '{"presets": [{"id": "a", "framework": "b", "model": "c", "seq_len": "long"}]}',
            "seq_len",
        ),
    ],
)
def test_files_of_another_format_are_told_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "presets.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_presets(path)


def test_unknown_keys_of_a_file_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "presets.json"
    path.write_text(
        json.dumps({"presets": [{"id": "a", "framework": "b", "model": "c", "mood": "good"}]})
    )
    assert read_presets(path)[0].model == "c"


def plan(mesh: str) -> Plan:
    return Plan(axes=parse_mesh(mesh))


def estimated(seconds: float, memory: int = 1) -> Estimated:
    return Estimated(
        step_s=seconds,
        bracket_s=(seconds, seconds),
        bound_s=0.0,
        memory_bytes=memory,
        causes=(("compute", seconds),),
    )


def compiled(seconds: float) -> Compiled:
    memory = Memory(
        argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0, peak_bytes=2
    )
    counts = Counts(flops=1, hbm_bytes=1, collectives=())
    return Compiled(
        fingerprint=str(seconds), memory=memory, counts=counts, step_s=seconds, compile_s=1.0
    )


ONE, TWO, THREE = plan("dp:8"), plan("fsdp:8"), plan("tp:8")


def test_rank_counts_the_plans_that_are_clearly_faster() -> None:
    times = {ONE: 1.0, TWO: 1.001, THREE: 2.0}
    assert [rank_of(one, times) for one in (ONE, TWO, THREE)] == [1, 1, 3]
    assert rank_of(plan("sp:8"), times) == 0


def test_replays_replace_estimates_and_correct_the_others() -> None:
    estimates = {ONE: estimated(1.0), TWO: estimated(1.2), THREE: estimated(1.1, memory=1000)}
    plain = believed_s(estimates, {}, free_bytes=0)
    assert plain == pytest.approx({ONE: 1.0, TWO: 1.2, THREE: 1.1})
    no_room = OutOfMemory(stage="compile", needed_bytes=2, limit_bytes=1, detail="")
    known = believed_s(estimates, {ONE: compiled(2.0), TWO: no_room}, free_bytes=100)
    assert set(known) == {ONE}  # TWO does not fit, THREE by its estimate hardly can
    assert known[ONE] == 2.0
    both = believed_s(estimates, {ONE: compiled(2.0)}, free_bytes=0)
    assert both[TWO] == pytest.approx(2.4, rel=0.15)


def side(name: str, **causes: float) -> Side:
    named = tuple((cause.replace("_", " "), seconds) for cause, seconds in causes.items())
    return Side(plan=name, step_s=sum(causes.values()), causes=named)


def test_differences_are_told_by_their_causes() -> None:
    ours = side("a", compute=1.0, ici_fsdp=0.1)
    slow = side("b", compute=0.95, ici_fsdp=0.4, ici_tp=0.02)
    said = difference(slow, ours)
    assert "the expert's spends 300 ms more on ici fsdp (400 ms against 100 ms)" in said
    assert "saves 50.0 ms on compute" in said
    assert "ours spends" in difference(ours, slow)
    assert difference(ours, ours) == difference(side("c", compute=1.1), ours) == ""


def row(name: str, ratio: float, rank: int, verdict: str = "fits") -> Row:
    expert = Side(plan="fsdp:8", step_s=ratio, verdict=verdict)
    return Row(
        id=name,
        legal=10,
        excluded=() if rank else ("tp <= 16 (32 > 16)",),
        rank=rank,
        compiled=2,
        expert=expert,
        ours=Side(plan="dp:8", step_s=1.0),
        ratio=ratio,
    )


class Compiler:
    """Stands for a bench: plans take what they are told to take, 0 does not fit."""

    def __init__(self, estimates: dict[Plan, float], replays: dict[Plan, float]) -> None:
        self.estimates = {plan: estimated(seconds) for plan, seconds in estimates.items()}
        self.replays = replays
        self.compiled: list[Plan] = []
        self.preparation = SimpleNamespace(
            device_memory=NO_LIMIT,
        )
        self.legal = SimpleNamespace(
            enumeration=SimpleNamespace(legal=tuple(estimates), reasons_against=lambda _: ()),
        )

    def compile(self, plans: Sequence[Plan], *, workers: int) -> None:
        assert len(plans) <= workers
        self.compiled += plans

    def outcome(self, plan: Plan) -> Outcome:
        seconds = self.replays[plan]
        if not seconds:
            return OutOfMemory(stage="compile", needed_bytes=2, limit_bytes=1, detail="")
        causes = (("compute", seconds / 2), ("ici tp", seconds / 2))
        replay = ReplayOutcome(
            step_s=seconds,
            bracket_s=(seconds, seconds),
            causes=causes,
            communication_s=(),
            busy_s=(),
            mfu=0.5,
        )
        return replace(compiled(seconds), replay=replay)


MESHES = [plan(text) for text in ("dp:8", "fsdp:8", "tp:8", "sp:8", "dp:4,tp:2", "dp:2,tp:4")]


def study(replays: list[float], expert: int, *, leaders: int) -> tuple[Row, list[Plan]]:
    """Plans whose estimates are 1, 2, 3 ... seconds."""
    estimates = {one: float(number) for number, one in enumerate(MESHES, start=1)}
    one = Compiler(estimates, dict(zip(MESHES, replays, strict=True)))
    found = Study(expert=BY_ID["p239"], one=cast(Bench, one), plan=MESHES[expert])
    found.climb(leaders=leaders, workers=2)
    return found.row(), one.compiled


def test_the_experts_plan_and_the_leaders_are_compiled() -> None:
    row, done = study([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 4, leaders=2)
    assert set(done) == {MESHES[4], MESHES[0], MESHES[1]} and len(done) == 3
    assert (row.rank, row.in_top5, row.ratio, row.compiled) == (5, True, 5.0, 3)
    assert row.ours.plan == "dp:8" and "the expert's spends" in row.cause


def test_a_leader_of_the_experts_is_compiled_once() -> None:
    row, done = study([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0, leaders=2)
    assert done == MESHES[:2]
    assert (row.rank, row.ratio, row.cause) == (1, 1.0, "")


def test_plans_that_do_not_fit_are_replaced() -> None:
    row, done = study([0.0, 0.0, 3.0, 4.0, 5.0, 6.0], 5, leaders=1)
    assert done == [MESHES[5], *MESHES[:3]]
    assert row.ours.plan == "tp:8" and row.ratio == 2.0


def test_an_expert_that_does_not_fit_has_no_place() -> None:
    row, _ = study([1.0, 2.0, 3.0, 4.0, 0.0, 6.0], 4, leaders=1)
    assert (row.rank, row.in_top5, row.ratio) == (0, False, 0.0)
    assert row.expert.verdict == "does not fit: 2 B of 1 B"


def test_what_only_the_reserve_keeps_out_is_told_with_it() -> None:
    one = Compiler({MESHES[0]: 1.0}, {MESHES[0]: 1.0})
    one.preparation.device_memory = DeviceMemory(limit_bytes=4, reserve_bytes=3)
    found = Study(expert=BY_ID["p239"], one=cast(Bench, one), plan=MESHES[0])
    found.climb(leaders=1, workers=1)
    side = found.row().expert
    assert not side.fits and side.verdict.endswith("B of 4 B, 3 B of it in reserve")


def test_an_expert_that_beats_the_leaders_is_not_ours() -> None:
    row, _ = study([2.0, 2.0, 2.0, 2.0, 1.0, 2.0], 4, leaders=2)
    assert (row.rank, row.ratio) == (1, 0.5)
    assert "ours spends" in row.cause


def test_summary_counts_presets() -> None:
    rows = [row("a", 1.0, 1), row("b", 1.5, 6), row("c", 0.9, 2)]
    rows.append(row("d", 0.0, 0, verdict="does not fit: 2 of 1"))
    found = summary(rows)
    assert (found["presets"], found["expert_in_top5"], found["median_ratio"]) == (4, 2, 1.0)
    assert (found["ties"], found["expert_faster"], found["with_ratio"]) == (1, 1, 3)
    assert (found["expert_does_not_fit"], found["excluded_by_space"]) == (1, 1)
    assert summary([])["median_ratio"] is None


def test_lines_name_exclusions_and_what_was_left_out() -> None:
    expert = BY_ID["p239"]
    text = "\n".join(described(expert, row("p239", 0.0, 0)))
    assert "our space excludes the expert's mesh: tp <= 16" in text
    assert "has no place" in text
    skipped = [
        Skipped(id="a", model="x", selector="", reason="why"),
        Skipped(id="b", model="y", selector="", reason="why"),
    ]
    assert left_out(skipped) == ["  why: a x, b y"]


def test_rows_are_kept_for_the_same_preset_and_settings_alone() -> None:
    one, other = BY_ID["p239"], BY_ID["p241"]
    assert digest_of(one, 3) == digest_of(one, 3)
    assert len({digest_of(one, 3), digest_of(other, 3), digest_of(one, 4)}) == 3


def test_kept_rows_are_read_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    one = replace(row("p239", 1.5, 6), expert=side("b", compute=1.0))
    Kept.open(path).keep(one, "digest")
    kept = Kept.open(path)
    assert kept.find(BY_ID["p239"], "digest") == one
    assert kept.find(BY_ID["p239"], "another") is None
    assert kept.find(BY_ID["p241"], "digest") is None


@pytest.mark.parametrize(
    "name",
    [
        "dense_lm",
        pytest.param("moe_lm", marks=pytest.mark.long),
        pytest.param("long_context", marks=pytest.mark.long),
    ],
)
def test_examples_take_a_batch_and_a_precision(name: str) -> None:
    words = ("--size", "tiny", "--rows", "16", "--length", "24", "--chunk", "12")
    with arguments(name, *words, "--dtype", "bfloat16"):
        workload = module(name).build(device_mesh({}))
    assert (workload.facts["batch"], workload.facts["seq"]) == (16, 24)
    assert workload.args[1]["inputs"].shape == (16, 24)
    assert workload.tokens_per_step == 16 * 24
    text = workload.step.lower(*workload.args).as_text()
    assert "bf16" in text
    with arguments(name, "--size", "tiny"):
        usual = module(name).build(device_mesh({}))
    assert "bf16" not in usual.step.lower(*usual.args).as_text()
