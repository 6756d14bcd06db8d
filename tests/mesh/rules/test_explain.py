"""`MeshConfig.explain`: which rule, which sizes, and where every device is."""

from __future__ import annotations

import math
import re
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from automesh import HybridMeshShape, MeshConfig, MeshRule
from automesh.errors import WrongType
from automesh.mesh.axes import MeshAxis
from automesh.mesh.mapping import LogicalMapping
from automesh.mesh.rules.explain import _folded
from automesh.mesh.settings import Settings
from tests.support.fakes.mesh_devices import nodes, slices

CONFIG = MeshConfig(
    mesh_shape=(-1, 4),
    mesh_axis_names=("data", "model"),
    mesh_rules=[
        ("tpu-v4-16", (1, -1)),
        ("tpu-v4-16-2", HybridMeshShape((2, -1), (-1, 1))),
        ("TPU-.*", (8, 1)),
        ("tpu-.*", None),
    ],
)


def test_two_slices_with_a_rule():
    devices = slices("TPU v4", (2, 4, 1), 2)
    assert CONFIG.explain("tpu-v4-16-2", devices=devices) == dedent("""\
        `tpu-v4-16-2`: rule 2
          1. `tpu-v4-16` matches only the beginning, `tpu-v4-16`
          2. `tpu-v4-16-2` matches first
          3. `TPU-.*` matches only if upper and lower case are the same
          4. `tpu-.*` matches too, after rule 2
        mesh shape: ICI data 2, model -1; DCN data -1, model 1
        devices: 16 x TPU v4 in 2 granules of 8 each: slices 0, 1
        -1: ICI model = 8 devices of a granule / 2 = 4
        -1: DCN data = 2 granules / 1 = 2
        DCN: given
        mesh: dcn.data:2,data:2,model:4
          data   DCN 2 x ICI 2: along slices, x
          model  ICI 4: along y
        each device: slice:x,y,z
          model ->  0        1        2        3
          data 0    0:0,0,0  0:0,1,0  0:0,2,0  0:0,3,0
          data 1    0:1,0,0  0:1,1,0  0:1,2,0  0:1,3,0
          data 2    1:0,0,0  1:0,1,0  1:0,2,0  1:0,3,0
          data 3    1:1,0,0  1:1,1,0  1:1,2,0  1:1,3,0""")


def test_two_nodes_without_a_rule():
    assert CONFIG.explain("gpu-h100-16", devices=nodes(2, 8)) == dedent("""\
        `gpu-h100-16`: no rule matches the whole of it; the default mesh
          1. `tpu-v4-16` does not match
          2. `tpu-v4-16-2` does not match
          3. `TPU-.*` does not match
          4. `tpu-.*` does not match
        mesh shape: data -1, model 4
        devices: 16 x NVIDIA H100 80GB HBM3 in 2 granules of 8 each: processes 0, 1
        -1: data = 16 devices / 4 = 4
        DCN: data is the first axis larger than 1, and its 4 is a multiple of the 2 granules
        mesh: dcn.data:2,data:2,model:4
          data   DCN 2 x ICI 2: along processes, the devices of a process
          model  ICI 4: along the devices of a process
        each device: process:id
          model ->  0     1     2     3
          data 0    0:0   0:1   0:2   0:3
          data 1    0:4   0:5   0:6   0:7
          data 2    1:8   1:9   1:10  1:11
          data 3    1:12  1:13  1:14  1:15""")


def test_the_devices_that_are_here():
    said = MeshConfig(mesh_shape=(2, 1, 2, -1), mesh_axis_names=tuple("abcd")).explain()
    assert said == dedent("""\
        no selector: the default mesh
        mesh shape: a 2, b 1, c 2, d -1
        devices: 16 x cpu, all of process 0
        -1: d = 16 devices / 4 = 4
        DCN: one granule, all 1
        mesh: a:2,c:2,d:4
          a  ICI 2: along the devices of a process
          c  ICI 2: along the devices of a process
          d  ICI 4: along the devices of a process
        each device: id
        a=0:
          d ->  0  1  2  3
          c 0   0  1  2  3
          c 1   4  5  6  7
        a=1:
          d ->  0   1   2   3
          c 0   8   9   10  11
          c 1   12  13  14  15""")


@pytest.mark.parametrize(
    ("selector", "first"),
    [
        (None, "no selector: the default mesh (4 rules are not asked)"),
        ("tpu-v4-8", "`tpu-v4-8`: rule 4, which asks for the default mesh"),
        ("tpu-v4-16", "`tpu-v4-16`: rule 1"),
    ],
)
def test_which_rule(selector, first):
    assert CONFIG.explain(selector, devices=nodes(1, 8)).splitlines()[0] == first


def test_a_config_without_rules():
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("data",))
    assert config.explain("x").splitlines()[0] == "`x`: there are no rules; the default mesh"


def test_granules_over_several_axes():
    config = MeshConfig(mesh_shape=(2, 8), mesh_axis_names=("data", "model"))
    assert (
        "DCN: the first axis larger than 1, data, is no multiple of the 4 granules, so that "
        "several span them: data 2, model 2" in config.explain(devices=nodes(4, 4)).splitlines()
    )


def test_the_settings_of_a_rule_are_told():
    config = MeshConfig(
        mesh_shape=(-1,),
        mesh_axis_names=("tp",),
        knobs={"remat": "none", "microbatches": 2},
        mesh_rules=[
            MeshRule(
                match="a",
                mesh_shape=None,
                knobs=Settings({"remat": "full"}),
                compiler_options=Settings({"xla_flag": True}),
                mapping=LogicalMapping({"mlp": "tp", "embed": "none"}),
            )
        ],
    )
    assert config.explain("a").splitlines()[2:5] == [
        "knobs: remat=full microbatches=2",
        "compiler options: xla_flag=True",
        "mapping: mlp:tp embed:none",
    ]
    assert config.explain("b").splitlines()[2] == "knobs: remat=none microbatches=2"


def test_what_does_not_fit_is_said_at_the_end():
    refused = CONFIG.explain(devices=nodes(1, 6)).splitlines()
    assert refused[-1].startswith("it does not fit these devices: the -1 in mesh sizes (-1, 4)")


def test_two_cores_of_a_chip_and_one_device():
    two = MeshConfig(mesh_shape=(4, 2), mesh_axis_names=("data", "model")).explain(
        devices=slices("TPU v3", (2, 2), 1, cores=2)
    )
    assert "  model  ICI 2: along cores" in two.splitlines()
    assert "each device: x,y,z.core" in two.splitlines()
    one = MeshConfig(mesh_shape=(1,), mesh_axis_names=("data",)).explain(devices=nodes(1, 1))
    assert one.splitlines()[-3:] == ["each device: id", "     +0", "  0  0"]


def test_one_axis_is_folded():
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("data",))
    lines = config.explain(devices=slices("TPU v4", (4, 4, 1), 1)).splitlines()
    assert lines[-3:] == [
        "  data ->  +0     +1     +2     +3     +4     +5     +6     +7",
        "  0        0,0,0  0,1,0  0,2,0  0,3,0  1,0,0  1,1,0  1,2,0  1,3,0",
        "  8        2,0,0  2,1,0  2,2,0  2,3,0  3,0,0  3,1,0  3,2,0  3,3,0",
    ]


@pytest.mark.parametrize(("fitting", "each"), [(6, 6), (5, 3), (1, 1)])
def test_a_folded_axis_has_the_longest_rows_that_fit_and_divide_it(fitting, each, monkeypatch):
    monkeypatch.setattr("automesh.mesh.rules.explain._WIDTH", len("dp") + 8 + fitting * (1 + 2))
    head, *rows = _folded(np.arange(6), [MeshAxis(name="dp", ici=6)], str)
    assert head.split() == ["dp", "->", *(f"+{at}" for at in range(each))]
    assert len(rows) == 6 // each


def test_a_large_mesh_fits_a_terminal():
    config = MeshConfig(mesh_shape=(8, 32, 32), mesh_axis_names=("pipe", "data", "model"))
    lines = config.explain(devices=nodes(1024, 8)).splitlines()
    drawing = lines[lines.index("each device: process:id") :]
    assert max(map(len, drawing)) <= 100
    assert len(drawing) < 80
    assert lines[-1] == "... and 6 more tables"


def test_a_selector_of_a_wrong_type_is_refused():
    with pytest.raises(WrongType, match="a selector must be a string, got a list"):
        CONFIG.explain(["tpu"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([-1, 1, 2, 3, 4]), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["tpu", "gpu", "cpu"]),
)
@example([2, -1], 4, "tpu")
def test_every_device_is_drawn_once_or_it_is_said_why_not(sizes, granules, platform):
    if sizes.count(-1) > 1:
        sizes = [abs(size) for size in sizes]
    devices = (
        slices("TPU v5 lite", (2, 4), granules)
        if platform == "tpu"
        else nodes(granules, 8, platform=platform)
    )
    config = MeshConfig(mesh_shape=sizes, mesh_axis_names=[f"a{i}" for i in range(len(sizes))])
    lines = config.explain(devices=devices).splitlines()
    if lines[-1].startswith("it does not fit"):
        known = math.prod(size for size in sizes if size != -1)
        assert math.prod(sizes) != len(devices)
        assert -1 not in sizes or len(devices) % known or granules > 1
        return
    start = next(i for i, line in enumerate(lines) if line.startswith("each device: "))
    place = r"\d,\d,\d" if platform == "tpu" else r"\d+"
    granule = r"\d:" if granules > 1 else "  " if platform == "tpu" else "id"
    if granule == "id":  # Numbers of rows and columns look the same.
        return
    drawing = "\n".join(lines[start + 1 :])
    drawn = re.findall(granule + place, drawing)
    assert len(drawn) == len(set(drawn))
    # What would not fit a terminal is left out, and that is shown.
    assert len(drawn) < len(devices) if "..." in drawing else len(drawn) == len(devices)
