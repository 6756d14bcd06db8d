"""Loadax's presets, and the rules that a config holds itself."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import automesh
from automesh import HybridMeshShape, MeshConfig, MeshRule, Rules, UsageError
from automesh.errors import WrongType
from automesh.mesh.layout.devices import SpreadGranulesWarning
from automesh.mesh.settings import Settings
from tests.support.fakes.mesh_devices import nodes, slices

PRESETS = (automesh.make_ddp_mesh_config, automesh.make_fsdp_mesh_config)


@pytest.mark.parametrize(
    ("make", "names", "ici", "dcn"),
    [
        (automesh.make_ddp_mesh_config, ("data",), (8,), (2,)),
        (automesh.make_ddp_mesh_config, ("data", "model"), (8, 1), (2, 1)),
        (automesh.make_fsdp_mesh_config, ("data",), (8,), (2,)),
        (automesh.make_fsdp_mesh_config, ("data", "model"), (1, 8), (2, 1)),
        (automesh.make_fsdp_mesh_config, ("pipeline", "data", "model"), (1, 1, 8), (2, 1, 1)),
    ],
)
@pytest.mark.parametrize("devices", [nodes(2, 8), slices("TPU v5 lite", (2, 4), 2)])
def test_presets_find_the_cluster(make, names, ici, dcn, devices):
    config = make(names, devices=devices)
    assert config.mesh_shape == HybridMeshShape(ici, dcn)
    assert config.batch_axis_names == ("data",)
    assert config.create_device_mesh(devices).devices.size == 16


def test_presets_take_the_devices_that_are_here():
    assert automesh.make_ddp_mesh_config().create_device_mesh().shape == {"data": 16}
    mesh = automesh.make_fsdp_mesh_config(("data", "model")).create_device_mesh()
    assert mesh.shape == {"data": 1, "model": 16}


@pytest.mark.parametrize("make", PRESETS)
def test_a_rule_of_a_preset_matches_whole_names(make):
    rules = [("tpu-v4", (4, 2)), ("tpu-v4-8", (2, 4)), ("tpu-.*", (8, 1))]
    found = make(("data", "model"), mesh_rules=rules, mesh_selector="tpu-v4-8", devices=nodes(1, 8))
    assert found.mesh_shape == (2, 4)
    assert found.select("tpu-v4-16").mesh_shape == (8, 1)
    other = make(("data", "model"), mesh_rules=rules, mesh_selector="gpu-8", devices=nodes(1, 8))
    assert isinstance(other.mesh_shape, HybridMeshShape)
    unasked = make(("data", "model"), mesh_rules=rules, devices=nodes(1, 8))
    assert unasked == other


@pytest.mark.parametrize("make", PRESETS)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"devices": []}, "a mesh needs at least one device, got none"),
        ({"devices": nodes(2, 8)[:12]}, "must have the same number of devices, got [4, 8]"),
        ({"mesh_axis_names": ()}, "mesh axes must be distinct names, got []"),
        ({"mesh_axis_names": "data"}, "mesh axis names must be a sequence of strings, got a str"),
        (
            {"mesh_axis_names": ("model",), "batch_axis_names": "data"},
            "batch axis `data` is not a mesh axis",
        ),
        (
            {"batch_axis_names": ("data", "data")},
            "batch axes must be distinct, got ['data', 'data']",
        ),
        (
            {"mesh_rules": [("cpu.*", None)], "mesh_selector": "cpu-8"},
            "the rule `cpu.*`, which matches `cpu-8`, has no mesh",
        ),
        ({"mesh_rules": [("cpu(", (8,))]}, "`cpu(` is not a regular expression"),
        ({"mesh_selector": 8}, "a selector must be a string, got an int: 8"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(make, arguments, said):
    with pytest.raises(ValueError) as caught:
        make(**{"mesh_axis_names": ("data",), "devices": nodes(1, 8), **arguments})
    assert isinstance(caught.value, UsageError)
    assert said in caught.value.message


def test_the_mesh_of_a_rule_is_made():
    config = MeshConfig(
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
        mesh_rules=[("cpu-16", (2, -1)), ("cpu-.*", None), MeshRule(match="x", mesh_shape=(1, 16))],
    )
    assert config.create_device_mesh(selector="cpu-16").shape == {"data": 2, "model": 8}
    assert config.create_device_mesh(selector="cpu-17").shape == {"data": 16, "model": 1}
    assert config.create_device_mesh(selector="gpu").shape == {"data": 16, "model": 1}
    assert config.create_device_mesh(selector="x").shape == {"data": 1, "model": 16}
    assert config.create_device_mesh().shape == {"data": 16, "model": 1}


def test_a_rule_changes_what_it_says_and_no_more():
    config = MeshConfig(
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
        knobs={"remat": "full", "microbatches": 1},
        mesh_rules=[
            ("a", None),
            ("b", (1, -1)),
            MeshRule(match="c", mesh_shape=None, knobs=Settings({"remat": "dots"})),
        ],
    )
    assert config.select("a") == config
    assert config.select("b").knobs == {"remat": "full", "microbatches": 1}
    assert config.select("b").mesh_shape == (1, -1)
    assert config.select("c").knobs == {"remat": "dots", "microbatches": 1}
    assert config.select("c").mesh_shape == (-1, 1)


@pytest.mark.parametrize("make", PRESETS)
def test_a_preset_without_the_axis_data_has_no_batch_axes_unless_said(make):
    assert make(("dp", "tp"), devices=nodes(1, 8)).batch_axis_names == ()
    assert make(("dp", "tp"), "dp", devices=nodes(1, 8)).batch_axis_names == ("dp",)
    assert make(("data", "tp"), devices=nodes(1, 8)).batch_axis_names == ("data",)


@pytest.mark.parametrize("given", [["auto", "explicit"], ("AUTO", AxisType.Explicit)])
def test_axis_types_are_those_that_are_asked_for(given):
    config = MeshConfig(
        mesh_shape=(2, -1), mesh_axis_names=("data", "model"), mesh_rules=[("cpu", (4, -1))]
    )
    assert config.create_device_mesh().axis_types == (AxisType.Auto,) * 2
    mesh = config.create_device_mesh(selector="cpu", axis_types=given)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)
    assert mesh.shape["data"] == 4
    with pytest.raises(UsageError, match="got 3 axis types"):
        config.create_device_mesh(axis_types=["auto"] * 3)


def test_batch_axes_are_those_of_loadax_unless_said():
    assert MeshConfig(mesh_shape=(8,), mesh_axis_names=("data",)).batch_axis_names == ("data",)
    assert MeshConfig(mesh_shape=(8,), mesh_axis_names=("dp",)).batch_axis_names == ()
    with pytest.raises(UsageError, match="batch axis `data` is not a mesh axis"):
        MeshConfig(mesh_shape=(8,), mesh_axis_names=("dp",), batch_axis_names="data")


@pytest.mark.parametrize(
    ("shape", "names", "devices", "expected"),
    [
        ((1, 2, 8), "pdm", nodes(2, 8), HybridMeshShape((1, 1, 8), (1, 2, 1))),
        ((2, 1, 8), "pdm", nodes(2, 8), HybridMeshShape((1, 1, 8), (2, 1, 1))),
        ((-1, 8), "dm", nodes(2, 8), HybridMeshShape((1, 8), (2, 1))),
    ],
)
def test_the_examples_of_the_documentation(shape, names, devices, expected):
    """Two H100 nodes, from Loadax's description of `mesh_shape`."""
    names = tuple(names)
    plain = MeshConfig(mesh_shape=shape, mesh_axis_names=names).create_device_mesh(devices)
    given = MeshConfig(mesh_shape=expected, mesh_axis_names=names).create_device_mesh(devices)
    assert plain == given


def test_granules_over_several_axes_are_told():
    config = MeshConfig(mesh_shape=(2, 32), mesh_axis_names=("data", "model"))
    said = r"the axes data, model of mesh \(2, 32\) all span granules .* `dcn.data:2,dcn.model:4,"
    with pytest.warns(SpreadGranulesWarning, match=said) as caught:
        mesh = config.create_device_mesh(nodes(8, 8))
    assert caught[0].filename == __file__
    assert [[d.id for d in row] for row in mesh.devices] == [list(range(32)), list(range(32, 64))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mesh_shape": 8}, "the mesh shape must be a sequence of integers, got an int: 8"),
        ({"mesh_shape": "8"}, "the mesh shape must be a sequence of integers, got a str: '8'"),
        ({"mesh_shape": (2.0, 4)}, "sizes of the mesh shape must be integers, got a float: 2.0"),
        ({"mesh_shape": (True, 8)}, "sizes of the mesh shape must be integers, got a bool: True"),
        ({"mesh_axis_names": ("a", 1)}, "mesh axis names must be strings, got an int: 1"),
        ({"batch_axis_names": 3}, "batch axis names must be a sequence of strings, got an int: 3"),
        ({"mesh_rules": 3}, "mesh rules must be a sequence of rules, got an int: 3"),
        ({"mesh_rules": ["tpu"]}, "a mesh rule must be a MeshRule or a pair of a regular"),
        ({"mesh_rules": [("tpu", 8)]}, "the rule `tpu` must be a sequence of integers, got an int"),
        ({"mapping": {1: "a"}}, "the logical axes of a mapping must be strings, got an int: 1"),
        ({"mapping": 5}, "an axis mapping must be a dict of logical to mesh axes, got an int: 5"),
        ({"mapping": "ab"}, "must be a dict of logical to mesh axes, got a str: 'ab'"),
        ({"mapping": [("a",)]}, "must be a dict of logical to mesh axes, got a list: [('a',)]"),
        ({"mapping": {"mlp": 5}}, "logical axis `mlp` must be mapped to a mesh axis, several or"),
        ({"mapping": {"mlp": [1]}}, "must be mapped to a mesh axis, several or None, got [1]"),
        ({"knobs": 5}, "knobs must be a dict of names to values, got an int: 5"),
        ({"knobs": {1: 2}}, "the names of knobs must be strings, got an int: 1"),
        ({"knobs": {"a": [1]}}, "`a` of the knobs must be a boolean, a number or a string, got a"),
        ({"compiler_options": "ab"}, "compiler options must be a dict of names to values, got a"),
    ],
)
def test_values_of_a_wrong_type_are_told(arguments, said):
    with pytest.raises(TypeError) as caught:
        MeshConfig(**{"mesh_shape": (2, 4), "mesh_axis_names": ("a", "b"), **arguments})
    assert isinstance(caught.value, WrongType)
    assert isinstance(caught.value, ValueError)
    assert said in caught.value.message


def test_a_rule_of_a_wrong_length_is_told():
    with pytest.raises(UsageError, match=r"in the rule `tpu` mesh shape \(2, 4\) has 2 sizes"):
        MeshConfig(mesh_shape=(8,), mesh_axis_names=("a",), mesh_rules=[("tpu", (2, 4))])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            ("tpu", (8,)),
            r"the rule `tpu` has the mesh \(8,\), which does not say what lies over ICI",
        ),
        (("tpu", None), "the rule `tpu` has the mesh None, which does not say"),
        (("tpu", HybridMeshShape((1, 8), (1, 1))), "does not have a size for each axis"),
    ],
)
def test_a_rule_of_a_file_says_what_lies_over_dcn(rule, said):
    match, shape = rule
    with pytest.raises(UsageError, match=said):
        Rules(axes=("data",), rules=(MeshRule(match=match, mesh_shape=shape),))


def test_a_rule_takes_dicts_and_can_be_hashed():
    rule = MeshRule(match="a", mesh_shape=(8,), mapping={"mlp": "tp"}, knobs={"remat": "full"})
    assert hash(rule) == hash(
        MeshRule(match="a", mesh_shape=[8], mapping=[("mlp", ["tp"])], knobs=[("remat", "full")])
    )
    with pytest.raises(WrongType, match="knobs must be a dict of names to values, got an int: 5"):
        MeshRule(match="a", mesh_shape=(8,), knobs=5)


def test_a_match_is_text():
    with pytest.raises(WrongType, match="the match of a rule must be a string, got an int: 8"):
        MeshRule(match=8, mesh_shape=(8,))
    with pytest.raises(WrongType, match="a selector must be a string, got an int: 8"):
        Rules(axes=("data",)).select(8)


def test_sizes_may_be_those_of_numpy():
    config = MeshConfig(mesh_shape=[np.int64(2), -1], mesh_axis_names=("a", "b"))
    assert config.mesh_shape == (2, -1)
    assert all(type(size) is int for size in config.mesh_shape)
    assert automesh.infer_mesh_shape([np.int32(4), -1]) == (4, len(jax.devices()) // 4)
    assert automesh.infer_mesh_shape((3, 5)) == (3, 5)
    assert automesh.infer_mesh_shape(np.array([2, -1]), num_devices=np.int64(8)) == (2, 4)
    for count in ("8", 8.0, True):
        with pytest.raises(TypeError, match="`num_devices` must be an integer, got a"):
            automesh.infer_mesh_shape((-1, 2), num_devices=count)
    with pytest.raises(UsageError, match="`num_devices` is 0; it must be at least 1"):
        automesh.infer_mesh_shape((-1, 2), num_devices=0)
