"""`parse_mesh_from_string` in its three forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.layout.create import create_mesh
from automesh.mesh.layout.devices import create_mesh_for
from automesh.mesh.layout.parse import parse_mesh_from_string
from tests.support.fakes.worlds import cpu_world, cpus, gpus, granule_grid, world

NAMES = ("dp", "fsdp", "tp")
SIZES = st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3).filter(
    lambda sizes: math.prod(sizes) <= 16
)
SPACES = st.sampled_from(["", " ", "  "])


@settings(max_examples=50, deadline=None)
@given(SIZES, st.permutations(NAMES), SPACES, st.data())
def test_a_string_gives_the_mesh_that_it_says(sizes, order, space, data):
    shape = dict(zip(NAMES, sizes, strict=True))
    inferred = data.draw(st.sampled_from([None, *NAMES]))
    said = {name: -1 if name == inferred else shape[name] for name in NAMES}
    named = f",{space}".join(f"{name}:{said[name]}" for name in order)
    positional = f"{space},".join(str(said[name]) for name in NAMES)
    with cpu_world(math.prod(sizes)):
        expected = create_mesh(sizes, NAMES)
        assert parse_mesh_from_string(positional, NAMES) is expected
        assert parse_mesh_from_string(named, NAMES, order="names") is expected
        in_order = parse_mesh_from_string(named, NAMES)
    assert in_order.axis_names == tuple(order)
    assert dict(in_order.shape) == shape


@settings(max_examples=30, deadline=None)
@given(SIZES, SIZES.filter(lambda sizes: 1 < math.prod(sizes) <= 4))
def test_the_canonical_text_of_axes_gives_their_mesh(ici, dcn):
    axes = [MeshAxis(name=name, ici=i, dcn=d) for name, i, d in zip(NAMES, ici, dcn, strict=True)]
    text = format_mesh(axes)
    # Each name has to be used here.
    unused = [f"{axis.name}:1" for axis in axes if axis.size == 1]
    devices = gpus(math.prod(dcn), math.prod(ici))
    with world(devices, processes=math.prod(dcn)):
        mesh = parse_mesh_from_string(",".join([text, *unused]), NAMES, order="names")
    assert mesh is create_mesh_for(axes, devices=devices)


def test_sizes_without_dcn_are_those_of_the_whole_mesh():
    with world(gpus(2, 4), processes=2):
        mesh = parse_mesh_from_string("dp:2,tp:4", ["dp", "tp"])
        assert granule_grid(mesh.devices).tolist() == [[0] * 4, [1] * 4]
        text_form = parse_mesh_from_string("dcn.tp:2,dp:2,tp:-1", ["dp", "tp"])
    # The string names tp first: its outer part are the processes.
    assert granule_grid(text_form.devices).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert text_form.axis_names == ("tp", "dp")


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        ("dp:2", ("dp", "tp"), "gives no size for `tp` of the axes ['dp', 'tp']"),
        ("dp:2,xx:4", ("dp", "tp"), "names the unknown axis `xx`; known are dp, tp"),
        ("fsdpp:8", ("fsdp",), "names the unknown axis `fsdpp` (did you mean `fsdp`?)"),
        ("dp:2,tp:2,dp:2", ("dp", "tp"), "gives the size of `dp` twice"),
        ("dp:2:3,tp:4", ("dp", "tp"), "`dp:2:3` in mesh `dp:2:3,tp:4` is not of the form"),
        ("dp:2,tp:4,", ("dp", "tp"), "`` in mesh `dp:2,tp:4,` is not of the form"),
        ("dp:x,tp:4", ("dp", "tp"), "`dp:x` in mesh `dp:x,tp:4` is not of the form"),
        ("dp:-1,tp:-1", ("dp", "tp"), "at most one may be -1"),
        ("dp:0,tp:4", ("dp", "tp"), "gives `dp` the size 0"),
        ("dp:2,tp:2", ("dp", "tp"), "multiply to 4, but there are 8 devices"),
        ("dcn.dp:2,tp:4", ("dp", "tp"), "multiply to 2, but there are 1 granules"),
        ("2,4,1", ("a", "b"), "mesh `2,4,1` has 3 sizes for the 2 axes"),
        (" ", ("a",), "`axis_dims` is empty"),
        ("2,", ("a", "b"), "`` in mesh `2,` is not a size"),
        ("2,x", ("a", "b"), "`x` in mesh `2,x` is not a size"),
        ("2,--4", ("a", "b"), "`--4` in mesh `2,--4` is not a size"),
        ("2,2", ("a", "b"), "multiply to 4, but there are 8 devices"),
        ("2,4", ("a", "a"), "distinct names, got ['a', 'a']"),
    ],
)
def test_a_string_that_does_not_fit_is_refused(text, names, said):
    with cpu_world(8), pytest.raises(UsageError) as caught:
        parse_mesh_from_string(text, names)
    assert said in caught.value.message


def test_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match="`axis_dims` must be a string, got a tuple"):
        parse_mesh_from_string((2, 4), ("a", "b"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`names` must be a sequence of strings, got a str"):
        parse_mesh_from_string("2,4", "ab")
    with pytest.raises(UsageError, match="`order` is 'sorted'; it must be `string` or `names`"):
        parse_mesh_from_string("2,4", ("a", "b"), order="sorted")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "order", "types"),
    [
        ("2,4", "string", (AxisType.Auto, AxisType.Explicit)),
        ("tp:4,dp:2", "string", (AxisType.Explicit, AxisType.Auto)),
        ("tp:4,dp:2", "names", (AxisType.Auto, AxisType.Explicit)),
        ("tp:4,dcn.dp:1,dp:2", "string", (AxisType.Explicit, AxisType.Auto)),
    ],
)
def test_axis_types_go_with_the_names(text, order, types):
    with cpu_world(8):
        mesh = parse_mesh_from_string(
            text, ["dp", "tp"], order=order, axis_types=["auto", "explicit"]
        )
        one = parse_mesh_from_string(text, ["dp", "tp"], order=order, axis_types="explicit")
        with pytest.raises(UsageError, match="got 3 axis types"):
            parse_mesh_from_string(text, ["dp", "tp"], order=order, axis_types=["auto"] * 3)
    assert dict(mesh.shape) == {"dp": 2, "tp": 4}
    assert mesh.axis_types == types
    assert one.axis_types == (AxisType.Explicit,) * 2


def test_all_devices_are_used():
    assert parse_mesh_from_string("-1", ["x"]).devices.tolist() == cpus(16)
