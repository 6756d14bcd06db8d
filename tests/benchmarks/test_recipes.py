"""The benchmark of published TPU runs: reading, sorting out, and figures; nothing is compiled."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.space.spec import read_space
from automesh.units import format_seconds
from benchmarks.recipes import command, probe, summary
from benchmarks.recipes.arguments import MENDED, RENAMED, arguments_of, gpt_sizes
from benchmarks.recipes.command import MEMORY, OWN_VERSIONS, PREDICTED, RECIPES, sort_out
from benchmarks.recipes.installed import Installed, read_installed
from benchmarks.recipes.kept import Kept
from benchmarks.recipes.options import SETS, options_of
from benchmarks.recipes.predict import (
    Asked,
    Found,
    Prediction,
    Stopped,
    asked_of,
    command_of,
    read_result,
    space_of,
)
from benchmarks.recipes.records import (
    Measured,
    Mesh,
    Record,
    Time,
    cheapest_first,
    gpt_tflop_per_token,
    measured_time,
    read_published,
)
from benchmarks.recipes.summary import Row

PUBLISHED = read_published(RECIPES)
FACTS = read_published(MEMORY)
BY_ID = {one.id: one for one in (*PUBLISHED.records, *PUBLISHED.oom_records)}
# All keys that any record has, less those that MaxText has renamed, and one that it does not know.
KEYS = frozenset(key for one in BY_ID.values() for key in one.flags) | {
    new for names in RENAMED.values() for new in names
}
INSTALLED = Installed(
    keys=KEYS - {*RENAMED, "tokamax_tile", "int8_training"},
    models=frozenset(name for one in BY_ID.values() if (name := one.flags.get("model_name"))),
    versions={"maxtext": "1", "jax": "2", "libtpu": "3"},
)


def record(**changes: Any) -> Record:
    usual = Record(
        id="x/1",
        source="someone",
        framework="MaxText",
        model="llama3.1-8b",
        chip="TPU v6e",
        chips=8,
        devices=8,
        topology="2x4",
        flags={"model_name": "llama3.1-8b", "remat_policy": "full"},
        xla_flags="",
        mesh=Mesh(ici={"fsdp": 8}),
        precision="bf16",
        group="g",
        flags_basis="recipe script",
        measured=Measured(step_s=2.0),
        seq_len=1000,
        global_batch=16.0,
        per_device_batch_size=2.0,
    )
    return replace(usual, **changes)


def asked(**changes: Any) -> Asked:
    usual = Asked(id="x/1", target="v6e:2x4", mesh="fsdp:8", words=("a=1",), options={})
    return replace(usual, **changes)


def row(step_s: float, *, digest: str = "", **changes: Any) -> Row:
    """A record that was predicted; 0 seconds if it is said not to fit."""
    one = record(**changes)
    kind = "predicted" if step_s else "does not fit"
    found = Found(mesh=one.mesh.text, kind=kind, step_s=step_s, peak_bytes=5, limit_bytes=9)
    return Row(
        record=one,
        time=measured_time(one, {}),
        prediction=Prediction(asked=asked(id=one.id), digest=digest or one.id, found=found),
    )


def test_the_file_has_all_that_was_published() -> None:
    assert (len(PUBLISHED.records), len(PUBLISHED.oom_records)) == (124, 3)
    assert {one.generation for one in PUBLISHED.records} == {"v4", "v5e", "v5p", "v6e", "7x"}
    assert all(one.outcome for one in PUBLISHED.oom_records)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"records": [{"id": 3}]}')
    with pytest.raises(UsageError, match="no file of published TPU runs"):
        read_published(path)
    data = json.loads(RECIPES.read_text("utf-8"))
    path.write_text(json.dumps({"records": [data["records"][0]] * 2}))
    with pytest.raises(UsageError, match="twice"):
        read_published(path)


@pytest.mark.parametrize("one", BY_ID.values(), ids=lambda one: one.id)
def test_devices_have_a_name_and_the_mesh_fills_them(one: Record, tmp_path: Path) -> None:
    absent = parse_target(one.target, os.environ).absent
    assert absent is not None
    assert absent.num_devices == one.devices
    assert absent.fabric.num_granules == one.slices
    path = tmp_path / "space.toml"
    path.write_text(space_of(one.mesh.text))
    sizes = 1
    for axis in read_space(str(path)).axes:
        assert axis.minimum == axis.maximum
        sizes *= axis.minimum
    assert sizes == one.devices


def test_a_mesh_over_slices_is_one_size_of_its_axis() -> None:
    mesh = Mesh(ici={"fsdp": 4, "data": 2, "tensor": 1}, dcn={"data": 3})
    assert mesh.text == "dcn.data:3,fsdp:4,data:2"
    assert "data = { size = 6, dcn = true }" in space_of(mesh.text)
    assert 'batch_axes = ["data", "fsdp"]' in space_of(mesh.text)


def test_times_are_measured_or_follow_from_what_a_chip_did() -> None:
    assert measured_time(record(), {}) == Time(step_s=2.0, basis="measured")
    rate = Measured(tflops_per_chip=50.0)
    # 2000 tokens of a chip, half a TFLOP each, at 50 TFLOP/s.
    derived = measured_time(record(measured=rate, tflop_per_token=0.5), {})
    assert derived is not None and derived.step_s == pytest.approx(20.0)
    assert measured_time(record(measured=rate), {}) is None
    assert measured_time(record(measured=Measured()), {}) is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("maxtext_tables/041", 22),
        ("maxtext_tables/002", 32),
        ("maxtext_tables/027", 64),
        ("maxtext_tables/004", 128),
        ("maxtext_tables/033", 256),
        ("maxtext_tables/035", 512),
    ],
)
def test_the_sizes_of_maxtexts_own_gpt_are_those_of_its_name(name: str, billions: int) -> None:
    sizes = gpt_sizes(BY_ID[name])
    # Without tokens before it, a token costs six for every parameter.
    parameters = gpt_tflop_per_token(sizes, 0) * 1e12 / 6
    assert parameters == pytest.approx(billions * 1e9, rel=0.04)
    assert gpt_tflop_per_token(sizes, 2048) > gpt_tflop_per_token(sizes, 0)


def test_sizes_of_other_models_are_not_guessed() -> None:
    assert gpt_sizes(BY_ID["tpu_recipes/060"]) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "AXLearn"}, "a run of AXLearn"),
        ({"flags": {"model_name": "nothing"}}, "has no model `nothing`"),
        ({"flags": {}}, "not published"),
        ({"seq_len": None}, "length"),
        ({"mesh": Mesh()}, "mesh"),
        ({"flags": {"model_name": "llama3.1-8b", "tokamax_tile": "1"}}, "know tokamax_tile"),
        ({"flags": {"model_name": "llama3.1-8b", "int8_training": "true"}}, "know int8_training"),
    ],
)
def test_what_maxtext_does_not_take_is_not_predicted(changes: dict[str, Any], reason: str) -> None:
    found = arguments_of(record(**changes), INSTALLED.keys, INSTALLED.models)
    assert reason in found.reason
    assert found.words == ()


def test_flags_are_given_renamed_or_left_out_and_it_is_said() -> None:
    flags = {
        "model_name": "llama3.1-8b",
        "int8_training": "false",
        "fsdp_shard_on_exp": "True",
        "steps": "30",
        "ici_fsdp_parallelism": "-1",
    }
    found = arguments_of(record(flags=flags), INSTALLED.keys, INSTALLED.models)
    assert found.words == (
        "model_name=llama3.1-8b",
        "shard_exp_on_fsdp=True",
        "max_target_length=1000",
        "per_device_batch_size=2",
    )
    assert found.left_out == ("int8_training (did nothing at false)", "steps (no part of the step)")
    assert found.remarks == ("fsdp_shard_on_exp is now shard_exp_on_fsdp",)


@pytest.mark.parametrize(
    ("mesh", "is_given"),
    [(Mesh(ici={"fsdp": 8}), False), (Mesh(ici={"fsdp": 4, "expert": 2}), True)],
)
def test_experts_are_chosen_at_random_only_where_maxtext_takes_that(
    mesh: Mesh, is_given: bool
) -> None:
    flags = {"model_name": "llama3.1-8b", "use_random_routing": "True"}
    found = arguments_of(record(flags=flags, mesh=mesh), INSTALLED.keys, INSTALLED.models)
    assert found.reason == ""
    assert ("use_random_routing=True" in found.words) == is_given
    assert len(found.left_out) == len(found.remarks) == (not is_given)


def test_tables_of_another_time_are_given_the_defaults_of_that_time() -> None:
    found = arguments_of(BY_ID["maxtext_tables/041"], INSTALLED.keys | {"vocab_size"}, frozenset())
    assert found.reason == ""
    assert {"base_emb_dim=6144", "base_num_kv_heads=24", "vocab_size=32768"} <= {*found.words}


def test_most_exact_runs_of_maxtext_are_predicted() -> None:
    chosen = sort_out(tuple(BY_ID.values()), INSTALLED, inexact=False)
    assert len(chosen.records) == 72
    assert len(chosen.records) + len(chosen.left_out) == len(BY_ID)
    assert all(one.is_exact for one in chosen.records)
    assert len(sort_out(tuple(BY_ID.values()), INSTALLED, inexact=True).records) > 72


def test_few_devices_come_first() -> None:
    devices = [one.devices for one in cheapest_first(PUBLISHED.records)]
    assert devices == sorted(devices) and devices[0] == 8


def test_installed_keys_and_models_are_read_from_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="laid out otherwise"):
        read_installed(tmp_path, {})
    (tmp_path / "models" / "more").mkdir(parents=True)
    (tmp_path / "models" / "more" / "big.yml").write_text("a: 1\n")
    (tmp_path / "base.yml").write_text("# no_key: 1\nsteps: 3\n  nested: 1\n")
    (tmp_path / "types.py").write_text('class A:\n  late: bool = Field(True, description="x")\n')
    found = read_installed(tmp_path, {"jax": "1"})
    assert found.keys == {"steps", "late"}
    assert found.models == {"big"}


def test_options_are_flags_and_names_of_sets() -> None:
    found = options_of("--xla_a=True CF_FOR_ALL_GATHER --xla_a=2 REMOVE --2a_chip=x SOME_SET")
    assert found.values == {"xla_a": "2", **SETS["CF_FOR_ALL_GATHER"]}
    assert [one.partition(" (")[0] for one in found.left_out] == [
        "REMOVE",
        "--2a_chip=x",
        "SOME_SET",
    ]
    assert found.texts[0] == "xla_a=2"
    assert "xla_a" not in found.without({"xla_a=2": "no such option"})
    assert found.without({"xla_a=3": "no such value"}) == found.values


def test_the_compiler_is_asked_once_for_a_set_of_options_a_chip_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def answer(generation: str, options: list[str]) -> dict[str, str]:
        calls.append(f"{generation} {len(options)}")
        return {one: "no such option" for one in options if one.startswith("xla_b")}

    monkeypatch.setattr(probe, "_asked", answer)
    asking = probe.Probe(path=tmp_path / "x" / "options.json", versions={"jax": "1"})
    for _ in range(2):
        found = asking.refused("v6e", ["xla_a=1", "xla_b=1"])
        assert found == {"xla_b=1": "no such option"}
    assert asking.refused("v5e", ["xla_a=1"]) == {}
    assert asking.refused("v5e", []) == {}
    newer = probe.Probe(path=asking.path, versions={"jax": "2"})
    assert newer.refused("v5e", ["xla_a=1"]) == {}
    assert calls == ["v6e 2", "v5e 1", "v5e 1"]


def test_options_that_do_not_go_together_are_left_out_one_by_one() -> None:
    def fails(options: Sequence[str]) -> str:
        if "gone=1" in options:
            return "No such compile option: 'gone'"
        if {"fused=1", "gathers=1", "async=1"} <= {*options}:
            return "not supported on this chip"
        return "nor this" if {"fused=1", "third=1"} <= {*options} else ""

    found = probe.refused_by(fails, ["other=1", "gathers=1", "gone=1", "async=1", "fused=1"])
    assert found == {
        "gone=1": "No such compile option: 'gone'",
        "gathers=1": "refused beside the others: not supported on this chip",
    }
    assert [*probe.refused_by(fails, ["third=1", "fused=1", "other=1"])] == ["third=1"]
    assert probe.refused_by(fails, ["other=1", "async=1"]) == {}
    # What no option is to blame for is not blamed on one.
    assert probe.refused_by(lambda _: "no memory", ["other=1"]) == {}


def test_records_that_ask_the_same_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[str] = []

    def compile_one(one: Asked, *_: object, **__: object) -> Prediction:
        if one.mesh == "fsdp:32":
            raise Stopped("no verdict")
        compiled.append(one.id)
        found = Found(mesh=one.mesh, kind="predicted", step_s=3.5, limit_bytes=1)
        return Prediction(asked=one, digest=one.digest, found=found)

    monkeypatch.setattr(command, "predicted", compile_one)
    monkeypatch.setattr(command, "find_installed", lambda: INSTALLED)
    monkeypatch.setattr(probe, "_asked", lambda *_: {})
    kept = tmp_path / "kept.jsonl"
    names = [f"tpu_recipes/{number}" for number in ("060", "068", "084", "080", "082", "058")]
    for _ in range(2):
        command.main(only=[",".join(names)], folder=tmp_path, kept=kept)
    assert compiled == ["tpu_recipes/060", "tpu_recipes/080"]
    assert set(Kept.open(kept).lines) == {*names[:4]}
    told = capsys.readouterr()
    assert "tpu_recipes/058 is not predicted: its flags are approximate" in told.err
    figures = json.loads(told.out.splitlines()[-1])
    assert (figures["records"], figures["compiles"]) == (4, 2)
    # 3.5 seconds against 3.416, 3.517, 3.443 and 3.393.
    assert figures["errors"]["dense bf16"]["median"] == pytest.approx(0.0206, abs=1e-4)


def test_every_set_that_an_exact_record_names_is_known() -> None:
    chosen = sort_out(tuple(BY_ID.values()), INSTALLED, inexact=False)
    unknown = {
        word.partition(" (")[0]: one.id
        for one in chosen.records
        for word in options_of(one.xla_flags).left_out
        if "of servers" not in word
    }
    assert set(unknown) == {
        "TPU_MEGACORE=MEGACORE_DENSE",
        "--2a886c8_chip_config_name=megachip_tccontrol",
    }


def test_what_is_asked_says_all_that_is_left_out() -> None:
    one = record(xla_flags="--xla_a=1 --xla_b=true NAME", jax="0.4")
    found = asked_of(
        one,
        arguments_of(one, INSTALLED.keys, INSTALLED.models),
        options_of(one.xla_flags),
        {"xla_b=true": "No such compile option"},
        INSTALLED.versions,
    )
    assert found.options == {"xla_a": "1"}
    assert [text.split()[0] for text in found.left_out] == ["NAME", "xla_b=true"]
    assert found.remarks == ("measured with jax 0.4, compiled with 2",)
    words = command_of(found, Path("/x"), limit="1h", top=0)
    assert words[:3] == ["maxtext", "--target", "v6e:2x4"]
    assert "--xla=xla_a=1" in words
    assert words[words.index("--") + 1 : -2] == list(found.words)
    # A mesh of the arguments would be compiled once more: it lies along an axis that none has.
    assert words[-2:] == ["ici_fsdp_transpose_parallelism=-1", "ici_fsdp_parallelism=1"]
    turned = command_of(replace(found, mesh="fsdp_transpose:8"), Path("/x"), limit="1h", top=0)
    assert turned[-2] == "ici_data_parallelism=-1"


def candidate(mesh: str, **outcome: Any) -> dict[str, Any]:
    return {"mesh": mesh, "outcome": outcome}


def played(step_s: float) -> dict[str, Any]:
    replay = {"step_s": step_s, "causes": [["compute", step_s]], "mfu": 0.5}
    return {
        "kind": "compiled",
        "compile_s": 3.0,
        "memory": {"peak_bytes": 7},
        "replay": {**replay, "uncounted": ["a kernel"], "speeds": "data sheet"},
    }


def test_a_result_gives_the_records_own_mesh_or_the_best_of_a_search() -> None:
    large = {"is_host": False, "needed_bytes": 12, "limit_bytes": 10, "detail": "too much"}
    result = {
        "device_memory_bytes": 10,
        "funnel": {"legal": 3},
        "candidates": [
            candidate("fsdp:8", **played(1.0)),
            candidate("fsdp:4,tensor:2", **played(2.0)),
            candidate("data:8", kind="estimated"),
            candidate("data:2,fsdp:4", kind="out_of_memory", **large),
            candidate("tensor:8", kind="failed", stage="lower", reason="no"),
        ],
    }
    found = read_result(asked(), result)
    assert (found.found.mesh, found.found.step_s, found.found.peak_bytes) == ("fsdp:8", 1.0, 7)
    assert [(one.mesh, one.kind) for one in found.others] == [
        ("fsdp:4,tensor:2", "predicted"),
        ("data:2,fsdp:4", "does not fit"),
        ("tensor:8", "failed"),
    ]
    assert found.legal == 3
    with pytest.raises(Stopped):
        read_result(asked(mesh="data:4,fsdp:2"), result)
    searched = read_result(asked(mesh="data:4,fsdp:2"), result, is_search=True)
    assert searched.found.mesh == "fsdp:8"


@pytest.mark.parametrize(
    "outcome",
    [
        {"kind": "estimated"},
        {"kind": "timed_out"},
        {"kind": "compiled", "replay": None},
        # This machine's memory, not that of a TPU.
        {"kind": "out_of_memory", "is_host": True},
    ],
)
def test_no_verdict_is_not_kept_as_one(outcome: dict[str, Any]) -> None:
    result = {"funnel": {}, "candidates": [candidate("fsdp:8", **outcome)]}
    with pytest.raises(Stopped):
        read_result(asked(), result)


def test_what_is_kept_serves_all_that_ask_the_same(tmp_path: Path) -> None:
    kept = Kept.open(tmp_path / "deep" / "x.jsonl")
    one = asked()
    found = Found(mesh="fsdp:8", kind="predicted", step_s=1.5)
    kept.keep(Prediction(asked=one, digest=one.digest, found=found))
    again = Kept.open(kept.path)
    assert again.lines == kept.lines
    other = again.find(asked(id="x/2"))
    assert other is not None
    assert (other.asked.id, other.same_as, other.found) == ("x/2", "x/1", found)
    for changes in ({"mesh": "data:8"}, {"options": {"xla_a": "1"}}, {"versions": {"jax": "9"}}):
        assert again.find(asked(**changes)) is None
    with kept.path.open("a") as file:
        file.write('{"half')
    with pytest.raises(UsageError, match="line 2"):
        Kept.open(kept.path)


def test_errors_are_counted_by_kind_and_generation_and_inexact_runs_apart() -> None:
    rows = [
        row(2.2, id="a"),
        row(1.8, id="b", chip="TPU v5p", topology="4x4x4"),
        row(3.0, id="c", model="mixtral-8x7b"),
        row(9.0, id="d", flags_basis="reconstructed: so"),
        row(0.0, id="e"),
    ]
    found = summary.summary(rows)
    dense = found["errors"]["dense"]
    assert (dense["records"], dense["median"], dense["bias"]) == (2, 0.1, 0.0)
    assert abs(dense["worst"]) == 0.1
    assert found["errors"]["mixture"]["median"] == 0.5
    assert found["errors"]["v5p"]["bias"] == -0.1
    assert found["not_exact"]["median"] == 3.5
    assert found["generations"] == ["v5p", "v6e"]
    assert (found["records"], found["exact"], found["compiles"]) == (5, 4, 5)


def test_pairs_are_of_one_slice_apart_and_asked_for_differently() -> None:
    mesh = Mesh(ici={"fsdp": 4, "tensor": 2})
    fast, slow = Measured(step_s=1.0), Measured(step_s=2.0)
    rows = [
        row(1.1, id="a", measured=fast, mesh=mesh),
        row(2.1, id="b", measured=slow),
        row(1.0, id="c", measured=Measured(step_s=2.01), digest="b"),
        row(0.5, id="d", measured=fast, topology="4x4", chips=16, devices=16),
    ]
    found = summary.order(rows)
    # a-b is right, a-c is wrong; b-c is one compile, d is on another slice.
    assert (found["pairs"], found["pairs_right"]) == (2, 1)
    assert (found["groups_of_meshes"], found["fastest_found"]) == (1, 0)
    assert "a before c" in found["missed"]


def test_a_batch_twice_as_large_is_compared_by_its_tokens() -> None:
    rows = [
        row(1.0, id="a", measured=Measured(step_s=1.0)),
        row(1.5, id="b", measured=Measured(step_s=1.6), global_batch=32.0),
    ]
    found = summary.order(rows)
    assert (found["pairs"], found["pairs_right"], found["groups_of_meshes"]) == (1, 1, 0)


def test_what_fits_is_counted_for_runs_that_did_and_did_not() -> None:
    rows = [
        row(1.0, id="a"),
        row(0.0, id="b"),
        row(0.0, id="c", outcome="OOM", measured=Measured()),
        row(1.0, id="d", outcome="OOM", measured=Measured()),
    ]
    assert summary.memory(rows) == {
        "ran": 2,
        "ran_said_not_to_fit": 1,
        "did_not_fit": 2,
        "did_not_fit_said": 1,
    }


def test_a_miss_is_told_with_what_may_be_its_cause() -> None:
    near, far = row(2.1), row(4.0)
    assert summary.causes(near) == []
    wanted = replace(
        far.prediction,
        asked=asked(remarks=("another jax",), left_out=("xla_a=1 (refused: no)", "steps")),
        found=replace(far.prediction.found, causes=(("compute", 3.0),), uncounted=("a kernel",)),
    )
    said = summary.causes(replace(far, prediction=wanted))
    assert said == [
        "of the predicted time: compute 3.00 s",
        "without a price: a kernel",
        "another jax",
        "1 options that the compiler refuses: xla_a",
    ]
    assert "(+100.0%)" in "\n".join(summary.described(far))
    assert "predicted not to fit" in summary.described(row(0.0))[1]


def test_the_published_mesh_stands_beside_the_best_that_is_found() -> None:
    one = row(2.0)
    best = replace(one.prediction, found=Found(mesh="tensor:8", kind="predicted", step_s=1.5))
    searched = replace(one, prediction=best)
    _, line = summary.beside([searched], {"x/1": one.prediction})
    assert "tensor:8" in line and line.endswith("0.750")
    _, line = summary.beside([searched], {"x/1": row(0.0).prediction})
    assert "does not fit" in line
    assert summary.beside([searched], {}) == []


def test_what_is_kept_in_the_repository_is_of_records_that_are_there() -> None:
    lines = Kept.open(PREDICTED).lines
    records = BY_ID | {one.id: one for one in (*FACTS.records, *FACTS.oom_records)}
    assert set(lines) <= set(records)
    for one in lines.values():
        assert one.digest == one.asked.digest
        assert one.asked.target == records[one.asked.id].target
        assert one.asked.mesh == records[one.asked.id].mesh.text


def test_what_mends_a_configuration_is_what_maxtext_says_of_it() -> None:
    """Nothing is added to a published run but what its own script has gained since."""
    (fact,) = (one for one in FACTS.records if one.id == "maxtext_memory/22b-tiled")
    for model, flags in MENDED.items():
        runs = [one for one in PUBLISHED.records if one.model == model]
        assert len(runs) == 8 and flags.items() <= fact.flags.items()
        for one in runs:
            assert one.mesh.ici == fact.mesh.ici and one.chip == fact.chip
            keys = INSTALLED.keys | {"vocab_size", *flags}
            found = arguments_of(one, keys, frozenset())
            assert {f"{key}={value}" for key, value in flags.items()} <= {*found.words}
            assert any("num_vocab_tiling=8 is added" in remark for remark in found.remarks)


def test_runs_predicted_with_their_own_versions_stand_for_themselves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.main(summary=True)
    told = capsys.readouterr().out
    for one in Kept.open(OWN_VERSIONS).lines.values():
        published, version = BY_ID[one.asked.id], one.asked.versions["jax"]
        assert (published.jax or "")[:4] == version[:4] < "0.11" and one.found.kind == "predicted"
        assert f"predicted {format_seconds(one.found.step_s)}" in told.partition(one.asked.id)[2]


def test_what_did_not_fit_stands_beside_what_mended_it() -> None:
    mended = {(one.model, one.chip, one.mesh.text) for one in FACTS.records}
    assert mended == {(one.model, one.chip, one.mesh.text) for one in FACTS.oom_records}
    assert all(one.outcome for one in FACTS.oom_records) and len(FACTS.oom_records) == 4


def test_the_model_of_maxtexts_own_defaults_needs_no_file() -> None:
    (one,) = (one for one in FACTS.records if one.id == "maxtext_memory/22b-tiled")
    keys = frozenset(key for key in one.flags if not key.startswith("ici_"))
    found = arguments_of(one, keys, frozenset())
    assert not found.reason and "model_name=default" in found.words
    assert "num_vocab_tiling=8" in found.words and "vocab_size=32768" not in found.words


def test_two_files_may_not_have_the_same_record(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(MEMORY.read_text("utf-8"), "utf-8")
    with pytest.raises(SystemExit, match="maxtext_memory/22b-tiled"):
        command.main([MEMORY, other], summary=True)
