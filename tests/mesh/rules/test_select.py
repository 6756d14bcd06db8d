"""Which rule applies, what is said when none does, and when evidence is stale."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from automesh.errors import UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.evidence import (
    NO_EVIDENCE,
    Evidence,
    StaleEvidenceWarning,
    differences,
    relevant_environment,
)
from automesh.mesh.rules.rule import MeshRule, escape, rule_for
from automesh.mesh.shape import HybridMeshShape


def rule(match, size=-1, evidence=NO_EVIDENCE):
    return MeshRule(match=match, mesh_shape=HybridMeshShape((size,), (1,)), evidence=evidence)


def rules(*matches):
    return Rules(axes=("dp",), rules=tuple(rule(match, i + 1) for i, match in enumerate(matches)))


def chosen(found):
    return found.mesh_shape.ici_mesh_shape[0]


TABLE = rules(
    "tpu-v4-(1024|2048)",
    "tpu-v5litepod-256",
    "tpu-v5litepod-256-2",
    "tpu-v5litepod-256-4",
    "tpu-v6e-256-(2|4|8)",
    "tpu-v5p-.*",
    "tpu-v5p-512",
)


@pytest.mark.parametrize(
    ("selector", "index"),
    [
        ("tpu-v4-1024", 1),
        ("tpu-v5litepod-256", 2),
        # A prefix match would take rule 2, which is about one slice.
        ("tpu-v5litepod-256-2", 3),
        ("tpu-v5litepod-256-4", 4),
        ("tpu-v6e-256-8", 5),
        # The first that matches wins.
        ("tpu-v5p-512", 6),
    ],
)
def test_whole_names_match_and_the_first_wins(selector, index):
    assert chosen(TABLE.select(selector)) == index


def test_no_match_lists_every_rule_with_its_reason():
    table = rules("tpu-v5p", "v5p-128", "TPU-v5p-128", "gpu-.*")
    with pytest.raises(UsageError) as caught:
        table.select("tpu-v5p-128")
    assert caught.value.message == (
        "no rule matches `tpu-v5p-128`: "
        "`tpu-v5p` matches only the beginning, `tpu-v5p`; "
        "`v5p-128` matches only a part, `v5p-128`; "
        "`TPU-v5p-128` matches only if upper and lower case are the same; "
        "`gpu-.*` does not match"
    )
    assert "default=" in caught.value.hint


def test_no_match_and_no_rules():
    with pytest.raises(UsageError, match="there are no rules"):
        Rules(axes=("dp",)).select("cpu-8")


def test_no_match_with_a_default():
    default = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("dp",))
    assert TABLE.select("cpu-8", default=default) is default


def test_without_a_name_the_attached_devices_decide():
    table = rules("cpu-8", "cpu-16", "cpu-.*")
    assert chosen(table.select()) == 2
    assert chosen(table.select(None)) == 2


def test_attached_devices_without_a_rule_are_named_with_all_rules():
    table = rules("cpu-8", "tpu-v5p-.*")
    with pytest.raises(UsageError) as caught:
        table.select()
    assert caught.value.message == (
        "no rule matches the attached devices, which are `cpu-16`: `cpu-8` does not match; "
        "`tpu-v5p-.*` does not match"
    )
    assert "automesh search" in caught.value.hint
    default = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("dp",))
    assert table.select(default=default) is default


def test_a_rules_mesh_has_its_axes_and_axis_types():
    plan = Plan(axes=parse_mesh("data:4,model:4", ("data", "model")))
    made = rule_for(
        plan,
        selector="cpu-16",
        evidence=NO_EVIDENCE,
        axis_types=("explicit", "auto"),
        batch_axes=("data",),
    )
    config = Rules(axes=("dp", "tp"), batch_axes=("dp",), rules=(made,)).select()
    assert config.batch_axis_names == ("data",)
    mesh = config.create_device_mesh()
    assert dict(mesh.shape) == {"data": 4, "model": 4}
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Auto)
    # Whoever asks for others gets them.
    assert config.create_device_mesh(axis_types="auto").axis_types == (AxisType.Auto,) * 2
    assert "axis types: data explicit, model auto" in config.explain().splitlines()


def test_a_configs_own_rules_have_its_axes():
    own = MeshRule(match="a", mesh_shape=(2, 4), axes=("dp", "tp"))
    with pytest.raises(UsageError, match="`a` is for the axes dp, tp, and this config has data, m"):
        MeshConfig(mesh_shape=(8, 1), mesh_axis_names=("data", "model"), mesh_rules=[own])
    config = MeshConfig(
        mesh_shape=(8, 1),
        mesh_axis_names=("dp", "tp"),
        batch_axis_names="dp",
        axis_types="explicit",
        mesh_rules=[
            own,
            MeshRule(match="b", mesh_shape=None, axis_types=("auto", "explicit"), batch_axes=()),
        ],
    )
    assert config.select("a").axis_types == ("explicit", "explicit")
    assert config.select("a").batch_axis_names == ("dp",)
    assert config.select("b").axis_types == ("auto", "explicit")
    assert config.select("b").batch_axis_names == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"axis_types": "manuel"}, "`manuel` is not an axis type"),
        ({"axis_types": ("auto",) * 3}, "got 3 axis types"),
        ({"axes": ("dp",)}, "2 sizes for its 1 axes"),
        ({"axes": ("dp", "dp")}, "mesh axes must be distinct names"),
        ({"axes": ("dp", "tp"), "batch_axes": ("data",)}, "batch axis `data` is not a mesh axis"),
    ],
)
def test_axes_and_types_that_do_not_fit_a_rule(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        MeshRule(match="a", mesh_shape=(2, 4), **given)


def test_explain_says_which_rules_match():
    assert TABLE.explain("tpu-v5p-512")[-2:] == ("`tpu-v5p-.*` matches", "`tpu-v5p-512` matches")


@pytest.mark.parametrize("match", ["tpu-(", "*", "[", "a{1000000000000}"])
def test_a_bad_regular_expression_is_refused(match):
    with pytest.raises(UsageError, match="is not a regular expression"):
        rule(match)


@given(st.text(max_size=20), st.text(max_size=20))
def test_an_escaped_selector_matches_itself_alone(selector, other):
    assert re.fullmatch(escape(selector), selector)
    assert bool(re.fullmatch(escape(selector), other)) == (selector == other)


def test_a_plan_becomes_a_rule():
    plan = Plan(
        axes=parse_mesh("dcn.dp:2,tp:4", ("dp", "tp")),
        knobs=(("remat", "dots"),),
        compiler_options=(("xla_a", 1),),
    )
    made = rule_for(plan, selector="gpu-p5.48xlarge-16", evidence=NO_EVIDENCE)
    assert made.match == r"gpu-p5\.48xlarge-16"
    assert made.mesh_shape == HybridMeshShape((1, 4), (2, 1))
    assert made.knobs == {"remat": "dots"}
    assert made.compiler_options == {"xla_a": 1}


def test_stale_evidence_warns_with_both_values():
    import importlib.metadata

    numpy = importlib.metadata.version("numpy")
    evidence = Evidence(
        kind="measured",
        versions=(("jax", "0.0.1"), ("numpy", numpy), ("automesh", "0.0.0"), ("nosuch", "1")),
        environment=(("XLA_FLAGS", "--xla_a=1"),),
    )
    table = Rules(axes=("dp",), rules=(rule("cpu-8", evidence=evidence),))
    with pytest.warns(StaleEvidenceWarning) as caught:
        table.select("cpu-8")
    message = str(caught[0].message)
    assert "the rule for `cpu-8` was measured elsewhere: jax 0.0.1 then, " in message
    assert "nosuch 1 then, not installed now" in message
    assert "XLA_FLAGS='--xla_a=1' then, '' now" in message
    assert "numpy" not in message
    assert "automesh" not in message
    assert caught[0].filename == __file__


def test_evidence_that_holds_does_not_warn():
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_a=1", "HOME": "/"}
    evidence = Evidence(kind="compiled", environment=tuple(relevant_environment(environ).items()))
    assert differences(evidence, {"XLA_FLAGS": "--xla_a=1"}) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TABLE.select("tpu-v5p-512")


def test_the_number_of_virtual_devices_is_no_environment():
    assert relevant_environment(
        {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "NCCL_ALGO": "Ring",
            "LIBTPU_INIT_ARGS": "--x --y",
            "PATH": "/bin",
        }
    ) == {"LIBTPU_INIT_ARGS": "--x --y", "NCCL_ALGO": "Ring"}
