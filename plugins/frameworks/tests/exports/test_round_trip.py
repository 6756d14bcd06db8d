"""Random rules survive each framework's words, and mean there what they mean here."""

from __future__ import annotations

import itertools
import json
from functools import reduce
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.shape import HybridMeshShape
from automesh.report.export.frameworks import (
    Granules,
    export_rules,
    granules_of,
    import_rules,
    names,
)
from automesh.report.export.nouns import AxisSize, ExportWords, Setting
from automesh.report.export.translate import rule_of, setting_of
from automesh.space.spec import read_space
from automesh_frameworks.steps.registry import FRAMEWORKS as SEARCHED
from plugins.frameworks.tests.support.cases.export_orders import FRAMEWORKS, check, orders_for
from plugins.frameworks.tests.support.cases.exports import (
    READERS,
    WITH_OPTIONS,
    rules_for,
    sizes_of,
)
from tests.support.paths import DATA

MESHES = json.loads((DATA / "expert_meshes.json").read_text())["meshes"]
# automesh's names of what expert presets call otherwise.
CONTEXT = ExportWords(axes={"cp": "context"})
COUNTED = ("microbatches", "gradient_accumulation_steps", "grad_acc_steps")


@pytest.mark.parametrize("name", names())
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_a_rule_comes_back_and_means_the_same(name: str, data: st.DataObject) -> None:
    rules = data.draw(rules_for(name))
    text = export_rules(rules, name)
    found = import_rules(text, name, match=rules.rules[0].match).rules
    (before,), (after,) = rules.rules, found.rules
    assert sizes_of(found) == sizes_of(rules)
    assert after.match == before.match
    assert set(found.batch_axes) <= set(rules.batch_axes)
    expected = dict(before.knobs)
    if name == "axlearn":
        expected.pop("batch", None)  # It is said outside of `mesh_rules`, in a comment.
    if name in ("levanter", "axlearn") and expected.get("microbatches") == 1:
        del expected["microbatches"]  # The whole batch at once is their default.
    assert dict(after.knobs) == expected
    options = dict(before.compiler_options)
    assert dict(after.compiler_options) == (options if name in WITH_OPTIONS else {})


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_a_framework_as_it_is_documented_makes_of_a_rule_what_was_meant(
    name: str, data: st.DataObject
) -> None:
    check(data.draw(orders_for(name)), name, READERS[name])


@pytest.mark.parametrize("name", [name for name in SEARCHED if name in FRAMEWORKS])
def test_a_rule_of_a_search_of_its_own_step_is_exported_as_it_is(name: str) -> None:
    """Before, all but MaxText's were refused: the export did not know the knobs of their steps."""
    space = read_space(SEARCHED[name].space)
    axes = tuple(axis.name for axis in space.axes)
    texts: dict[str, tuple[object, ...]] = {}
    for values in itertools.product(*(knob.values for knob in space.knobs)):
        knobs = dict(zip((knob.name for knob in space.knobs), values, strict=True))
        shape = HybridMeshShape((8, *(1 for _ in axes[1:])), tuple(1 for _ in axes))
        rule = MeshRule(match="cpu-8", mesh_shape=shape, knobs={**knobs, "batch": 64})
        rules = Rules(axes=axes, batch_axes=space.batch_axes, rules=(rule,))
        text = export_rules(rules, name)
        assert text not in texts, (values, texts[text])
        texts[text] = values
        (back,) = import_rules(text, name, match="cpu-8").rules.rules
        accumulation = [value for key, value in knobs.items() if key in COUNTED]
        assert [back.knobs.get("microbatches", 1)] == (accumulation or [1])


def test_axlearn_is_told_of_no_loop_of_one_part() -> None:
    """Before, the exported rule of a search trained another program than the one searched."""
    shape = HybridMeshShape((8,), (1,))
    for steps, is_written in ((1, False), (2, True)):
        rule = MeshRule(match="cpu-8", mesh_shape=shape, knobs={"grad_acc_steps": steps})
        text = export_rules(Rules(axes=("data",), batch_axes=("data",), rules=(rule,)), "axlearn")
        assert ("GradientAccumulationModifier" in text) is is_written
        assert ("Accumulation of cpu-8: none." in text) is not is_written


@pytest.mark.parametrize("name", [name for name in SEARCHED if name in FRAMEWORKS])
def test_a_knob_left_as_configured_is_not_written(name: str) -> None:
    axes = FRAMEWORKS[name].axes[:1]
    shape = HybridMeshShape((8,), (1,))
    texts = [
        export_rules(
            Rules(
                axes=axes,
                batch_axes=axes,
                rules=(MeshRule(match="cpu-8", mesh_shape=shape, knobs={"batch": 64, **knobs}),),
            ),
            name,
        )
        for knobs in ({}, {"gradient_accumulation_steps": 0}, {"grad_acc_steps": 0})
    ]
    assert len(set(texts)) == 1


# What may be left out: where it lies, and the default.
DEFAULTS: dict[str, dict[tuple[str, ...], int]] = {
    "maxtext": {
        (f"{network}_{axis}_parallelism",): 1
        for network in ("ici", "dcn")
        for axis in ("data", "pipeline", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
    }
    | {("ici_fsdp_parallelism",): -1, ("dcn_data_parallelism",): -1},
    "levanter": {
        ("trainer", "mesh", "axes", "data"): -1,
        ("trainer", "mesh", "axes", "replica"): 1,
        ("trainer", "mesh", "axes", "model"): 1,
        ("trainer", "mesh", "dcn_axes", "replica_dcn"): -1,
    },
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", DEFAULTS)
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_what_a_file_leaves_out_is_filled_in_as_the_framework_does(
    name: str, data: st.DataObject
) -> None:
    order = data.draw(orders_for(name).filter(lambda order: order.is_plain))
    tree = yaml.safe_load(export_rules(order.rules, name))
    for *tables, key in data.draw(st.lists(st.sampled_from(list(DEFAULTS[name])), unique=True)):
        table = reduce(lambda table, key: table[key], tables, tree)
        if DEFAULTS[name][(*tables, key)] in (-1, table[key]):
            del table[key]
    granules = Granules(
        selector="x", num_devices=order.on.num_devices, num_granules=order.on.num_granules
    )
    found = import_rules(yaml.safe_dump(tree), name, granules=granules).rules
    assert sizes_of(found) == order.sizes


def _setting(mesh: dict[str, Any]) -> Setting:
    framework = FRAMEWORKS[mesh["framework"]]
    names = dict(framework.names)
    ici, dcn = mesh.get("flat", mesh.get("ici")), mesh.get("dcn", {})
    sizes = {names[axis]: (ici.get(axis, 1), dcn.get(axis, 1)) for axis in {*ici, *dcn}}
    axes = (AxisSize(name=n, ici=sizes.get(n, (1, 1))[0], dcn=sizes.get(n, (1, 1))[1])
            for n in framework.axes)  # fmt: skip
    return Setting(
        match="tpu-v5p-128", axes=tuple(axes), flat="flat" in mesh, remat=mesh.get("remat")
    )


def _id(mesh: dict[str, Any]) -> str:
    sizes = mesh.get("flat") or {"ici": mesh.get("ici"), "dcn": mesh.get("dcn")}
    return f"{mesh['framework']}-{json.dumps(sizes)}-{mesh.get('remat', '')}"


@pytest.mark.parametrize("mesh", MESHES, ids=_id)
def test_a_published_mesh_comes_back_as_itself(mesh: dict[str, Any]) -> None:
    framework = FRAMEWORKS[mesh["framework"]]
    setting = _setting(mesh)
    text = framework.write((setting,))
    (read,) = framework.read(text)
    if mesh["framework"] == "easydel" and "flat" not in mesh:
        # What eformer makes of (1, 4, 1, 2, 1) and (1, 2, 1, 1, 1) has the sizes of both.
        assert 'sharding_axis_dims": (1, 8, 1, 2, 1)' in text
    assert (read.used, read.flat, read.remat) == (setting.used, setting.flat, setting.remat)
    # By way of a rules file, too: a flat mesh then says where its granules lie.
    words = CONTEXT if "cp" in mesh.get("ici", {}) else ExportWords()
    if setting.flat and setting.used[0].ici != -1 and -1 in [axis.ici for axis in setting.axes]:
        # How much of its first axis lies between granules depends on their number.
        with pytest.raises(UsageError, match="lies between slices or nodes"):
            rule_of(read, framework, words)
        text = text.replace("tpu-v5p-128", "tpu-v5p-.*")
        four = import_rules(text, "axlearn", granules=granules_of("tpu-v5p-256-4")).rules
        assert sizes_of(four)["ep"] == (4, 4)
        return
    rule = rule_of(read, framework, words)
    rules = Rules(axes=rule.axes, batch_axes=rule.batch_axes or (), rules=(rule,))
    again = setting_of(rules, rules.rules[0], framework, words)
    assert again.remat == setting.remat
    if not setting.flat:
        assert again.used == setting.used
        assert framework.read(framework.write((again,)))[0].used == setting.used
    else:
        assert [axis.ici for axis in again.axes] == [axis.ici for axis in setting.axes]


def test_all_published_meshes_are_there() -> None:
    assert sum(mesh["presets"] for mesh in MESHES) == 240
    assert {mesh["framework"] for mesh in MESHES} == {"maxtext", "axlearn", "levanter", "easydel"}


@pytest.mark.parametrize("batch", [("dp",), ("dp", "fsdp"), ("fsdp", "tp")])
def test_the_axes_that_split_a_batch_come_back(batch: tuple[str, ...]) -> None:
    rule = MeshRule(
        match="cpu-8",
        mesh_shape=HybridMeshShape(ici_mesh_shape=(2, 2, 2), dcn_mesh_shape=(1, 1, 1)),
    )
    rules = Rules(axes=("dp", "fsdp", "tp"), batch_axes=batch, rules=(rule,))
    found = import_rules(export_rules(rules, "loadax"), "loadax", match="cpu-8").rules
    assert found.batch_axes == batch
