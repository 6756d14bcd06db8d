"""The text form of a mesh, shapes with -1, and the nouns that hold them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.axes import DEFAULT_AXES, MeshAxis, Plan, format_mesh, parse_mesh
from automesh.mesh.config import MeshConfig
from automesh.mesh.infer import infer_sizes, resolve_shape
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.settings import Settings
from automesh.mesh.shape import HybridMeshShape

sizes = st.integers(1, 64)
meshes = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=6).map(
    lambda parts: tuple(
        MeshAxis(name=f"a{index}", ici=ici, dcn=dcn) for index, (ici, dcn) in enumerate(parts)
    )
)


@given(meshes, st.randoms())
def test_what_is_printed_is_read_back_in_any_order(axes, random):
    names = [axis.name for axis in axes]
    pieces = format_mesh(axes).split(",")
    random.shuffle(pieces)
    plan = Plan(axes=axes)
    read = parse_mesh(
        " , ".join(pieces),
        names,
        num_devices=plan.num_devices,
        num_granules=plan.num_granules,
    )
    assert read == axes
    assert format_mesh(read) == format_mesh(axes)


@given(meshes, st.data())
def test_one_size_is_inferred(axes, data):
    plan = Plan(axes=axes)
    part = data.draw(st.sampled_from(["ici", "dcn"]))
    chosen = data.draw(st.sampled_from(axes)).name
    pieces = [f"{axis.name}:{axis.ici}" for axis in axes if (part, axis.name) != ("ici", chosen)]
    pieces += [
        f"dcn.{axis.name}:{axis.dcn}" for axis in axes if (part, axis.name) != ("dcn", chosen)
    ]
    pieces.append(f"{'dcn.' if part == 'dcn' else ''}{chosen}:-1")
    read = parse_mesh(
        ",".join(pieces),
        [axis.name for axis in axes],
        num_devices=plan.num_devices,
        num_granules=plan.num_granules,
    )
    assert read == axes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=2", "`dp=2` in mesh `dp=2` is not of the form `axis:size` or `dcn.axis:size`"),
        ("", "`` in mesh `` is not of the form"),
        ("dp:2:3", "is not of the form"),
        ("xx:8", "names the axis `xx`, which is none of: dp, fsdp, ep, tp, sp"),
        ("dp:2,dp:4", "gives the size of `dp` twice"),
        ("dp:0", "gives `dp` the size 0; sizes are at least 1, or -1"),
        ("dp:-2", "gives `dp` the size -2"),
        ("dp:-1,tp:-1", "leaves 2 sizes to be inferred; at most one may be -1"),
        ("dcn.dp:-1,dp:-1,tp:-1", "leaves 2 sizes to be inferred; at most one may be -1"),
        (
            "dp:-1,tp:3",
            "the -1 of `dp` in mesh `dp:-1,tp:3` cannot be inferred: 8 is not a multiple",
        ),
        ("dp:2", "the sizes of mesh `dp:2` multiply to 2, but there are 8 devices"),
        ("dcn.dp:2,tp:8", "multiply to 2, but there are 1 granules (slices or nodes)"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text, said):
    with pytest.raises(UsageError) as caught:
        parse_mesh(text, DEFAULT_AXES, num_devices=8)
    assert said in caught.value.message


def test_an_axis_checks_itself():
    with pytest.raises(UsageError, match="not a mesh axis name"):
        MeshAxis(name="d-p")
    with pytest.raises(UsageError, match="both must be at least 1"):
        MeshAxis(name="dp", ici=0)


@given(st.lists(sizes, min_size=1, max_size=5), st.data())
def test_infer_sizes_restores_the_missing_one(known, data):
    index = data.draw(st.integers(0, len(known) - 1))
    with_gap = [-1 if i == index else size for i, size in enumerate(known)]
    assert infer_sizes(with_gap, math.prod(known)) == tuple(known)
    assert infer_sizes(known, math.prod(known)) == tuple(known)


@pytest.mark.parametrize(
    ("shape", "devices", "granules", "expected"),
    [
        ((2, -1), 8, 1, ((2, 4), (1, 1))),
        # The first axis larger than 1 carries the granules.
        ((1, 2, 8), 16, 2, ((1, 1, 8), (1, 2, 1))),
        ((-1, 8), 16, 2, ((1, 8), (2, 1))),
        (HybridMeshShape((1, -1), (-1, 1)), 512, 2, ((1, 256), (2, 1))),
        (HybridMeshShape((-1, 4), (1, 1)), 8, 1, ((2, 4), (1, 1))),
    ],
)
def test_a_shape_is_resolved(shape, devices, granules, expected):
    resolved = resolve_shape(shape, num_devices=devices, num_granules=granules)
    assert (resolved.ici_mesh_shape, resolved.dcn_mesh_shape) == expected


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    st.integers(0, 3),
)
def test_granules_lie_along_leading_axes(sizes, granules, gap):
    total = math.prod(sizes)
    if total % granules:
        granules = 1
    given_sizes = [-1 if axis == gap else size for axis, size in enumerate(sizes)]
    first = next((size for size in sizes if size > 1), 1)
    try:
        resolved = resolve_shape(given_sizes, num_devices=total, num_granules=granules)
    except UsageError:
        # No axis may be split where another has to be skipped for it.
        assert first % granules
        assert any(
            size % left and left % size
            for size, left in zip(sizes, _left_over(sizes, granules), strict=True)
        )
        return
    ici, dcn = resolved.ici_mesh_shape, resolved.dcn_mesh_shape
    assert [inside * across for inside, across in zip(ici, dcn, strict=True)] == sizes
    assert math.prod(dcn) == granules
    if first % granules == 0:
        assert [size for size in dcn if size > 1] == [granules] * (granules > 1)
    # An axis that shares the granules with later ones lies wholly between them.
    last = max((axis for axis, across in enumerate(dcn) if across > 1), default=0)
    assert all(inside == 1 for inside in ici[:last])


def _left_over(sizes, granules):
    """Granules that remain for each axis once those before it have taken theirs."""
    for size in sizes:
        yield granules
        granules = granules // size if granules % size == 0 else 1


@pytest.mark.parametrize(
    ("shape", "devices", "granules", "said"),
    [
        ((2, 2), 8, 1, "multiply to 4, but there are 8 devices"),
        ((3, -1), 8, 1, "8 devices is not a multiple of 3"),
        ((3, 4), 12, 2, "axis 0, of size 3, is neither a multiple nor a divisor of 2"),
        (HybridMeshShape((2, 4), (1, 1)), 16, 2, "multiply to 1, but there are 2 granules"),
        (HybridMeshShape((2, 8), (2, 1)), 16, 2, "there are 8 devices in each granule"),
        ((-1, -1), 8, 1, "more than one -1"),
        ((0, 8), 8, 1, "mesh size 0 in (0, 8) is neither positive nor -1"),
        ((-2, -4), 8, 1, "mesh size -2"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shape, devices, granules, said):
    with pytest.raises(UsageError) as caught:
        resolve_shape(shape, num_devices=devices, num_granules=granules)
    assert said in caught.value.message


def test_a_hybrid_shape_is_a_value():
    shape = HybridMeshShape([1, 8], [2, 1])
    assert shape == HybridMeshShape((1, 8), (2, 1))
    assert len({shape, HybridMeshShape((1, 8), (2, 1))}) == 1
    assert len(shape) == 2
    with pytest.raises(
        UsageError, match=r"as many ICI sizes as DCN sizes, got \(1, 2\) and \(3,\)"
    ):
        HybridMeshShape((1, 2), (3,))


def test_a_config_is_a_value_and_takes_lists_strings_and_dicts():
    config = MeshConfig(
        mesh_shape=[-1, 2],
        mesh_axis_names=["data", "model"],
        batch_axis_names="data",
        knobs={"remat": "full"},
    )
    assert hash(config) == hash(
        MeshConfig(
            mesh_shape=(-1, 2),
            mesh_axis_names=("data", "model"),
            batch_axis_names=("data",),
            knobs=Settings([("remat", "full")]),
        )
    )
    assert dict(**config.knobs) == {"remat": "full"}


def test_own_rules_of_a_config_and_its_default():
    special = HybridMeshShape((1, 8), (1, 1))
    config = MeshConfig(
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
        mesh_rules=[
            MeshRule(match="tpu-.*", mesh_shape=special, knobs=Settings({"remat": "dots"}))
        ],
    )
    assert config.select("tpu-v5p-8").mesh_shape == special
    assert config.select("tpu-v5p-8").knobs == {"remat": "dots"}
    assert config.select("gpu-h100-8") is config
    # Whole names only: a prefix is no match.
    assert config.select("my-tpu-v5p-8") is config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mesh_shape": (2, 4), "mesh_axis_names": ("a",)}, "has 2 sizes for the 1 axes"),
        ({"mesh_shape": (2, 4), "mesh_axis_names": ("a", "a")}, "must be distinct names"),
        ({"mesh_shape": (), "mesh_axis_names": ()}, "must be distinct names"),
        (
            {"mesh_shape": (2,), "mesh_axis_names": ("data",), "batch_axis_names": "dota"},
            "batch axis `dota` is not a mesh axis (did you mean `data`?)",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(arguments, said):
    with pytest.raises(UsageError) as caught:
        MeshConfig(**arguments)
    assert said in caught.value.message
