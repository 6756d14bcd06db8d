"""Mappings of logical axes as values and as text: in plans, in rules, on the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import automesh
from automesh.errors import UsageError
from automesh.jsonio import from_json, to_json
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.evidence import Evidence
from automesh.mesh.mapping import LogicalMapping, format_axes, parse_axes
from automesh.mesh.rules.file import merge_rule, read_rules
from automesh.mesh.rules.rule import MeshRule, rule_for
from automesh.mesh.shape import HybridMeshShape
from automesh.outcomes import TimedOut
from automesh.report.columns import knob_cells
from automesh.report.comparison import Comparison
from automesh.report.files.csv import plan_cells
from automesh.report.result import Candidate
from automesh.report.words import settings_shown
from automesh.tuner.choose.baseline import parse_plan
from automesh.tuner.study.optuna_records import extended, new_trial, read_trial

AXES = ("dp", "fsdp", "tp")
MAPPED = st.lists(st.sampled_from(AXES), unique=True).map(tuple)
NAMES = st.text(st.sampled_from("abz_-./9"), min_size=1, max_size=6)
MAPPINGS = st.dictionaries(NAMES, MAPPED, max_size=4).map(lambda said: tuple(said.items()))


def plan(mesh="dp:2,tp:4", mapping=(), **parts):
    return Plan(axes=parse_mesh(mesh, AXES), mapping=mapping, **parts)


WHOLE = plan(
    mapping=(("embed", ("fsdp",)), ("mlp", ("tp", "fsdp")), ("vocab", ())),
    knobs=(("remat", "full"),),
    compiler_options=(("xla_a", 1),),
)


def test_a_plan_prints_its_mapping_before_its_knobs():
    assert str(WHOLE) == "dp:2,tp:4 embed:fsdp mlp:tp+fsdp vocab:none remat=full xla_a=1"


def test_build_and_frameworks_get_names_tuples_and_none():
    mapping = LogicalMapping(WHOLE.mapping)
    assert dict(mapping) == {"embed": "fsdp", "mlp": ("tp", "fsdp"), "vocab": None}
    assert mapping == {"embed": "fsdp", "mlp": ("tp", "fsdp"), "vocab": None}
    assert len({mapping, LogicalMapping(dict(mapping))}) == 1
    # The order is the priority of Flax's rules.
    assert mapping != LogicalMapping(reversed(WHOLE.mapping))


@given(mapping=MAPPINGS)
@settings(max_examples=60, deadline=None)
def test_every_way_of_writing_a_mapping_is_read_back(mapping):
    assert LogicalMapping(LogicalMapping(mapping)).axes == mapping
    assert all(parse_axes(format_axes(axes)) == axes for _, axes in mapping)
    one = plan(mapping=mapping)
    assert from_json(json.loads(json.dumps(to_json(one, Plan))), Plan) == one
    said = str(one)
    defaults = tuple((name, ("dp",)) for name, _ in mapping)
    read = parse_plan(
        said, names=AXES, num_devices=8, num_granules=1, knobs={}, varied=(), mapping=defaults
    )
    assert read == one


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"em bed": "tp"}, "`em bed` is not the name of a logical axis"),
        ({"a:b": "tp"}, "`a:b` is not the name of a logical axis"),
        ({"": "tp"}, "`` is not the name of a logical axis"),
        ({"mlp": ["tp", "tp"]}, "mapped to \\['tp', 'tp'\\]: one of them twice"),
        ({"mlp": ["tp", "none"]}, "which are no mesh axes"),
        ({"mlp": ""}, "which are no mesh axes"),
    ],
)
def test_what_is_no_mapping_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        LogicalMapping(values)


def test_a_rule_carries_its_mapping_to_the_training_script(tmp_path):
    path = tmp_path / "mesh_rules.toml"
    rule = rule_for(WHOLE, selector="cpu-8", evidence=Evidence(kind="measured", step_s=1.0))
    merge_rule(path, rule, selector="cpu-8")
    line = 'mapping = { embed = "fsdp", mlp = ["tp", "fsdp"], vocab = "none" }'
    assert line in path.read_text()
    assert read_rules(path).rules == (replace(rule, axes=()),)
    config = automesh.load(path).select("cpu-8")
    assert dict(config.mapping) == dict(LogicalMapping(WHOLE.mapping))
    assert dict(config.knobs) == {"remat": "full"}

    # Another winner replaces it; the user's comment stays.
    path.write_text(path.read_text().replace("[[rule]]", "# ours\n[[rule]]"))
    other = rule_for(plan(), selector="cpu-8", evidence=Evidence(kind="measured", step_s=0.5))
    merge_rule(path, other, selector="cpu-8")
    assert "mapping" not in path.read_text() and "# ours" in path.read_text()
    assert read_rules(path).rules == (replace(other, axes=()),)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{ embed = "pp" }', "mapped to `pp`, which is no mesh axis"),
        ('{ embed = "fsbp" }', "did you mean `fsdp`"),
        ("{ embed = 3 }", "rule\\[0\\].mapping.embed"),
        ('{ "em bed" = "tp" }', "not the name of a logical axis"),
    ],
)
def test_a_broken_mapping_in_a_rules_file_is_told_with_its_place(said, message, tmp_path):
    path = tmp_path / "mesh_rules.toml"
    path.write_text(
        'schema = 1\naxes = ["dp", "fsdp", "tp"]\n[[rule]]\nmatch = "x"\n'
        f"ici = {{ dp = 8 }}\nmapping = {said}\n"
    )
    with pytest.raises(UsageError, match=message) as error:
        read_rules(path)
    assert "mesh_rules.toml" in str(error.value)


def test_a_config_takes_a_dict_and_checks_its_axes():
    config = MeshConfig(
        mesh_shape=(2, 1, 4), mesh_axis_names=AXES, batch_axis_names=("dp",), mapping={"mlp": "tp"}
    )
    assert dict(config.mapping) == {"mlp": "tp"}
    with pytest.raises(UsageError, match="`model`, which is no mesh axis"):
        MeshConfig(
            mesh_shape=(2, 1, 4),
            mesh_axis_names=AXES,
            batch_axis_names=("dp",),
            mapping={"mlp": "model"},
        )
    rule = MeshRule(
        match="x", mesh_shape=HybridMeshShape((1, 1, 8), (1, 1, 1)), mapping={"mlp": "model"}
    )
    with pytest.raises(UsageError, match="`model`, which is no mesh axis"):
        Rules(axes=AXES, rules=(rule,))


def test_a_baseline_may_map_logical_axes():
    def read(text, mapping=WHOLE.mapping):
        return parse_plan(
            text,
            names=AXES,
            num_devices=8,
            num_granules=1,
            knobs={"remat": "full"},
            varied=("remat",),
            mapping=mapping,
        )

    assert str(read("dp:8")) == "dp:8 embed:fsdp mlp:tp+fsdp vocab:none remat=full"
    changed = read("fsdp:-1 vocab:tp embed:none remat=none")
    assert str(changed) == "fsdp:8 embed:none mlp:tp+fsdp vocab:tp remat=none"
    with pytest.raises(UsageError, match="no logical axis of the search \\(did you mean `vocab`"):
        read("dp:8 vocap:tp")
    with pytest.raises(UsageError, match="commas alone part mesh axes"):
        read("dp:8 tp:1", mapping=())
    with pytest.raises(UsageError, match="`pp`, which is no mesh axis"):
        read("dp:8 vocab:pp")
    with pytest.raises(UsageError, match=r"`dpp`, which is no mesh axis \(did you mean `dp`\?\)"):
        read("dp:8 vocab:dpp+tensors")


def test_a_trial_keeps_the_mapping_as_choices_of_the_study():
    plans = (WHOLE, plan(mapping=(("embed", ()), ("mlp", ("tp",)), ("vocab", ()))))
    choices = extended({}, plans)
    assert choices["mapping.embed"] == ["fsdp", "none"]
    assert choices["mapping.mlp"] == ["tp+fsdp", "tp"]
    trials = [new_trial(one, choices, source_hash="h", versions=()) for one in plans]
    assert [trial.params["mapping.mlp"] for trial in trials] == [0, 1]
    assert [read_trial("compile", trial).plan for trial in trials] == list(plans)


def test_tables_show_logical_axes():
    row = Candidate(
        plan=WHOLE,
        outcome=TimedOut(stage="build", limit_s=1.0),
        standing=Comparison(verdict="not_measured"),
    )
    assert settings_shown(row)["mapping.mlp"] == "tp+fsdp"
    assert knob_cells(row, ("mapping.mlp", "remat")) == ["mlp:tp+fsdp", "remat=full"]
    # Where shardings are inferred: what splits nothing on the mesh is left out.
    found = replace(row, is_scripts=False)
    over = [axis for axis in ("tp", "fsdp") if WHOLE.sizes[axis] > 1]
    assert settings_shown(found)["mapping.mlp"] == "+".join(over)
    assert "mapping.vocab" not in settings_shown(found)
    assert plan_cells(WHOLE)["mapping.vocab"] == "none"
