"""What a framework cannot say is refused with its reason; foreign files are read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import automesh
from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.evidence import Evidence, RunnerUp
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.shape import HybridMeshShape
from automesh.report.export.baseline import read_baseline
from automesh.report.export.frameworks import Granules, export_rules, import_rules
from automesh.report.export.nouns import ExportWords
from plugins.frameworks.tests.support.cases.exports import READERS

AXES = ("dp", "fsdp", "ep", "tp", "sp")


def rules_of(
    *, knobs: dict[str, object] | None = None, match: str = "tpu-v5p-128", **sizes: object
):
    """A rule with sizes as `dp=(2, 4)`: inside a granule, between granules."""
    pairs = [sizes.pop(name, (1, 1)) for name in AXES]
    ici, dcn = zip(*pairs, strict=True)
    rule = MeshRule(match=match, mesh_shape=HybridMeshShape(ici, dcn), knobs=knobs or {}, **sizes)
    return Rules(axes=AXES, batch_axes=("dp", "fsdp"), rules=(rule,))


@pytest.mark.parametrize(
    ("name", "rules", "reason"),
    [
        (
            "levanter",
            rules_of(ep=(4, 1)),
            "axis `ep` has no counterpart among replica, data, model",
        ),
        ("tunix", rules_of(fsdp=(4, 2)), "has the size 2 between granules"),
        ("tunix", rules_of(dp=(4, 1)), "axis `dp` has no counterpart"),
        ("easydel", rules_of(fsdp=(4, 1), tp=(2, 2)), "eformer divides its axis `fsdp`"),
        ("easydel", rules_of(match="gpu-h100-16", fsdp=(8, 2)), "by processes, not by nodes"),
        (
            "maxtext",
            rules_of(dp=(4, 1), knobs={"remat": "mine"}),
            "no name for the knob remat=mine",
        ),
        ("maxtext", rules_of(dp=(4, 1), knobs={"attention": "flash"}), "the knob attention=flash"),
        ("maxtext", rules_of(dp=(4, 1), knobs={"microbatches": 2}), "does not say the batch"),
        (
            "maxtext",
            rules_of(dp=(4, 1), knobs={"microbatches": 2, "batch": 7}),
            "not a multiple of 2 microbatches",
        ),
        ("levanter", rules_of(dp=(4, 1), axis_types="explicit"), "axes of the type explicit"),
        ("axlearn", rules_of(dp=(4, 1), mapping={"mlp": "tp"}), "maps logical axes"),
    ],
)
def test_a_refusal_says_why(name: str, rules: Rules, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        export_rules(rules, name)
    assert "cannot say this rule" in error.value.message
    assert error.value.hint


def test_two_axes_that_are_one_there_are_refused() -> None:
    rule = MeshRule(match="x", mesh_shape=HybridMeshShape((2, 2), (1, 1)))
    rules = Rules(axes=("sp", "cp"), rules=(rule,))
    with pytest.raises(UsageError, match="both `sp` and `cp` are its axis `context`"):
        export_rules(rules, "maxtext")
    text = export_rules(rules, "maxtext", words=ExportWords(axes={"sp": "tensor_sequence"}))
    assert yaml.safe_load(text)["ici_tensor_sequence_parallelism"] == 2


def test_the_user_names_what_is_called_otherwise() -> None:
    rules = rules_of(ep=(4, 1), knobs={"remat": "mine", "attention": "flash", "other": 1})
    words = ExportWords(
        axes={"ep": "expert"},
        remat={"mine": "full"},
        knobs={"attention": "attn_backend"},
        leave_out=("other",),
    )
    tree = yaml.safe_load(export_rules(rules, "levanter", words=words))
    assert tree["trainer"]["mesh"]["axes"]["expert"] == 4
    assert tree["model"]["gradient_checkpointing"] is True
    assert tree["attn_backend"] == "flash"
    for wrong in (
        ExportWords(axes={"nope": "data"}),
        ExportWords(leave_out=("nope",)),
        ExportWords(knobs={"nope": "x"}),
        ExportWords(axes={"dp": "a: b\nc"}),
    ):
        with pytest.raises(UsageError):
            export_rules(rules, "levanter", words=wrong)
    with pytest.raises(UsageError, match="MaxText has no axis `modle`"):
        export_rules(rules_of(tp=(4, 1)), "maxtext", words=ExportWords(axes={"tp": "modle"}))


def test_knobs_of_maxtexts_own_step_are_its_keys() -> None:
    knobs = {"remat_policy": "save_qkv_proj", "gradient_accumulation_steps": 2, "batch": 16}
    knobs["custom_mesh_and_rule"] = "pure-fsdp"
    text = export_rules(rules_of(fsdp=(4, 1), knobs=knobs), "maxtext")
    told = yaml.safe_load(text)
    assert told["remat_policy"] == "save_qkv_proj"
    assert (told["gradient_accumulation_steps"], told["per_device_batch_size"]) == (2, 2.0)
    assert told["custom_mesh_and_rule"] == "pure-fsdp"
    with pytest.raises(UsageError, match="no name for the knob remat_policy=mine"):
        export_rules(rules_of(fsdp=(4, 1), knobs={"remat_policy": "mine"}), "maxtext")


def test_the_evidence_stands_in_a_comment_that_nothing_ends() -> None:
    evidence = Evidence(
        kind="measured",
        step_s=0.05,
        interval_s=(0.04, 0.06),
        hbm_bytes=2**30,
        runner_up=RunnerUp(plan="dp:8\nimport os", slower=1.02),
        study="a\rb",
    )
    rules = rules_of(fsdp=(8, 1), evidence=evidence, match='x"\ny')
    for name in READERS:
        text = export_rules(rules, name)
        comment = [line for line in text.split("\n") if line.startswith("#")]
        assert any("50.0 ms for a step, measured (95 % interval 40.0 ms" in one for one in comment)
        assert "\r" not in text and "\nimport os" not in text
        assert import_rules(text, name, match="z").rules.rules


def test_python_is_read_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nmesh_rules = [('tpu-.*', mesh_shape_from_axes(data=-1))]\n"
    assert import_rules(text, "axlearn").rules.rules[0].match == "tpu-.*"
    assert not mark.exists()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text",
    ["", "\0", "[" * 5000, "a: &a [*a]", "mesh: {shape: 3, axis_names: 3}", "x = (", "mesh: 1",
     "trainer: {mesh: {axes: {data: -7}}}", "sharding_axis_dims = (0, 2)", "\ud800",
     "ici_fsdp_parallelism=many", "mesh_rules = [('a', f(x))]", "- 1", "!!python/object:os.x {}"],
)  # fmt: skip
def test_a_file_that_says_no_mesh_is_an_error_of_one_sentence(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        import_rules(text, name)


def test_what_is_not_taken_over_is_said() -> None:
    text = """
mesh_rules = (
    ("tpu-v5e-.*", ChainConfigModifier.default_config().set(config_modifiers=[
        MeshShapeModifier.default_config().set(mesh_shape=mesh_shape_from_axes(data=-1, fsdp=8)),
        RematSpecModifier.default_config().set(remat_policies={
            "model.decoder": RematSpec(prevent_cse=False, policy=f(x)(y))}),
        INT8ConfigModifier.default_config(),
    ])),
)
"""
    found = import_rules(text, "axlearn")
    assert len(found.notes) == 2 and "INT8ConfigModifier" in found.notes[1]
    assert found.rules.rules[0].mesh_shape == HybridMeshShape(
        (1, -1, 1, 8, 1, 1), (1, -1, 1, 1, 1, 1)
    )


def test_a_key_without_effect_in_maxtext_is_told() -> None:
    with pytest.raises(UsageError, match="does nothing"):
        import_rules("ici_sequence_parallelism=2", "maxtext")


def test_a_baseline_may_be_a_file_of_a_framework(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m train ici_fsdp_parallelism=-1 \\\n  dcn_data_parallelism=4 # x=1\n")
    said = f"maxtext:{path}"
    assert read_baseline(said, target="tpu-v5p-256-4") == "dcn.dp:4,fsdp:128"
    assert read_baseline(said) == "dcn.dp:4,fsdp:-1"
    assert read_baseline("json:8") == "json:8"
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(f"maxtext:{tmp_path / 'nothing'}")
    (tmp_path / "rules.py").write_text("mesh_rules = [('a', (1,1,1,8,1,1)), ('b', (1,1,1,4,1,1))]")
    with pytest.raises(UsageError, match="2 rules"):
        read_baseline(f"axlearn:{tmp_path / 'rules.py'}")


def test_python_exports_and_imports(tmp_path: Path) -> None:
    path = tmp_path / "mesh_rules.toml"
    path.write_text(
        'schema = 1\naxes = ["dp", "fsdp"]\nbatch_axes = ["dp"]\n'
        '[[rule]]\nmatch = "cpu-8"\nici = { fsdp = 8 }\n'
        '[[rule]]\nmatch = "tpu-.*"\nici = { fsdp = -1 }\ndcn = { dp = -1 }\n'
    )
    with pytest.raises(UsageError, match="2 rules"):
        automesh.export(path, to="maxtext")
    with pytest.raises(UsageError, match="not a framework"):
        automesh.export(path, to="maxtxt")
    open_sizes = automesh.export(path, to="axlearn")
    assert "dcn_mesh_shape=(1, -1, 1, 1, 1, 1)" in open_sizes
    text = automesh.export(path, to="maxtext", select="tpu-v5p-256-4", batch=1024)
    tree = yaml.safe_load(text)
    assert (tree["ici_fsdp_parallelism"], tree["dcn_data_parallelism"]) == (128, 4)
    assert tree["per_device_batch_size"] == 2.0
    out = tmp_path / "mesh.yml"
    out.write_text(text)
    rules = automesh.import_rules(out, framework="maxtext", target="tpu-v5p-256-4")
    assert rules.select("tpu-v5p-256-4").knobs == {"microbatches": 1, "batch": 1024}
    with pytest.raises(UsageError, match="no devices whose number is known"):
        automesh.import_rules(out, framework="maxtext", target="local")


def test_the_rows_of_a_device_are_not_rounded_down() -> None:
    sizes = {"dp": (4, 1), "fsdp": (25, 1)}
    with pytest.raises(UsageError, match="29 rows are no share of its 100 devices"):
        export_rules(rules_of(**sizes, knobs={"batch": 29}), "maxtext")
    tree = yaml.safe_load(export_rules(rules_of(**sizes, knobs={"batch": 50}), "maxtext"))
    assert tree["per_device_batch_size"] == 0.5
    said = "per_device_batch_size=0.3 gradient_accumulation_steps=4 ici_fsdp_parallelism=8"
    granules = Granules(selector="cpu-8", num_devices=8, num_granules=1)
    found = import_rules(said, "maxtext", granules=granules).rules.rules[0]
    # Two rows of all devices, four times.
    assert found.knobs["batch"] == 8


def test_a_batch_of_easydel_is_one_microbatch() -> None:
    rules = rules_of(fsdp=(8, 1), knobs={"microbatches": 4, "batch": 64})
    text = export_rules(rules, "easydel")
    assert '"total_batch_size": 16,' in text
    assert import_rules(text, "easydel").rules.rules[0].knobs["batch"] == 64


def pipelined(size: int, **knobs: object) -> Rules:
    rule = MeshRule(match="x", mesh_shape=HybridMeshShape((size, 2), (1, 1)), knobs=knobs)
    return Rules(axes=("pp", "fsdp"), rules=(rule,))


PIPELINED, OPEN_PIPELINE = pipelined(4, batch=12, microbatches=2), pipelined(-1)


def test_what_maxtext_recomputes_all_the_same_is_said() -> None:
    for remat, is_said in (("none", True), ("full", False)):
        text = export_rules(rules_of(fsdp=(8, 1), knobs={"remat": remat}), "maxtext")
        assert ("scan_layers=false keeps all" in text) == is_said


@pytest.mark.parametrize(
    ("name", "rules", "reason"),
    [
        ("tunix", rules_of(fsdp=(-1, 1)), "infers no sizes, and that of its axis `fsdp` is open"),
        ("easydel", rules_of(dp=(2, 1), fsdp=(4, -1)), "sizes that the rule leaves open"),
        ("easydel", rules_of(fsdp=(-1, 1), tp=(2, 2)), "sizes that the rule leaves open"),
        ("easydel", rules_of(fsdp=(8, 1), knobs={"microbatches": 2}), "does not say the batch"),
        ("maxtext", PIPELINED, "deals the 6 rows of a microbatch to 4 pipeline stages"),
        ("maxtext", OPEN_PIPELINE, "takes an open size of `pipeline` for no pipeline"),
        (
            "levanter",
            rules_of(dp=(4, 1), knobs={"batch": 6}),
            "a batch of 6 rows is not a multiple of 4 devices",
        ),
    ],
)  # fmt: skip
def test_what_depends_on_open_sizes_or_does_not_divide_is_refused(
    name: str, rules: Rules, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        export_rules(rules, name)


def test_open_sizes_that_leave_no_doubt_are_written() -> None:
    text = export_rules(rules_of(fsdp=(4, -1), tp=(2, 1)), "easydel")
    assert "(1, -1, 1, 2, 1)" in text and "(1, -1, 1, 1, 1)" in text
    assert import_rules(text, "easydel").rules.rules[0].mesh_shape == HybridMeshShape(
        (1, -1, 1, 2, 1), (1, -1, 1, 1, 1)
    )
    with pytest.raises(UsageError, match="depends on sizes that are open"):
        import_rules(text.replace("(1, -1, 1, 2, 1)", "(2, -1, 1, 2, 1)"), "easydel")
