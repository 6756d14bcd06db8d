"""`create_mesh`: shapes, device order, granules, and what it keeps."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis
from automesh.mesh.layout.create import create_mesh, mesh_on
from automesh.mesh.layout.devices import create_mesh_for
from tests.support.fakes.worlds import cpu_world, gpus, granule_grid, ids, tpus, world

NAMES = ("a", "b", "c")


def factorizations(total: int, axes: int) -> list[tuple[int, ...]]:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return [one for one in itertools.product(divisors, repeat=axes) if math.prod(one) == total]


def jobs() -> list[tuple[list, int]]:
    """Devices and how many granules they form."""
    return [
        (gpus(1, 8), 1),
        (gpus(2, 8, shuffled=True), 2),
        (gpus(4, 4), 4),
        (tpus("TPU v4", (2, 2, 4)), 1),
        (tpus("TPU v4", (2, 2, 2), slices=2), 2),
        (tpus("TPU v5 lite", (2, 2, 1), slices=4), 4),
        ([one for one in gpus(2, 8) if one.process_index == 1], 1),
        ([one for one in tpus("TPU v4", (2, 2, 2), slices=2) if one.slice_index == 1], 1),
    ]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(jobs()), st.data())
def test_every_legal_mesh_has_its_shape_and_the_order_of_jax(job, data):
    devices, granules = job
    inside = data.draw(st.sampled_from(factorizations(len(devices) // granules, 3)))
    outer = data.draw(st.sampled_from(factorizations(granules, 3)))
    shape = tuple(i * o for i, o in zip(inside, outer, strict=True))
    mesh = mesh_on(devices, shape, NAMES, dcn_mesh_dims=outer if granules > 1 else None)
    assert mesh.axis_names == NAMES
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto,) * 3
    by_slice = devices[0].platform == "tpu"
    if granules > 1:
        expected = mesh_utils.create_hybrid_device_mesh(
            inside,
            outer,
            devices,
            process_is_granule=not by_slice,
            allow_split_physical_axes=True,
        )
    else:
        expected = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    assert ids(mesh.devices) == ids(expected)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(jobs()), st.data())
def test_it_is_the_layout_of_the_plan_with_the_same_parts(job, data):
    devices, granules = job
    inside = data.draw(st.sampled_from(factorizations(len(devices) // granules, 3)))
    outer = data.draw(st.sampled_from(factorizations(granules, 3)))
    axes = [
        MeshAxis(name=name, ici=i, dcn=o) for name, i, o in zip(NAMES, inside, outer, strict=True)
    ]
    sizes = [axis.size for axis in axes]
    mesh = mesh_on(devices, sizes, NAMES, dcn_mesh_dims=outer if granules > 1 else None)
    assert mesh is create_mesh_for(axes, devices=devices)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 3, 4, 6]), st.sampled_from([2, 4, 6]), st.data())
def test_any_shape_can_be_spread_over_processes(count, each, data):
    shape = data.draw(st.sampled_from(factorizations(count * each, 3)))
    grid = granule_grid(mesh_on(gpus(count, each), shape, NAMES).devices)
    assert grid.shape == shape
    for process in range(count):
        places = np.argwhere(grid == process)
        box = places.max(axis=0) - places.min(axis=0) + 1
        assert math.prod(box) == len(places) == each


@pytest.mark.parametrize(
    ("shape", "slices", "outer"),
    [
        ((2, 8), 2, (2, 1)),
        ((1, 16), 2, (1, 2)),
        ((2, 8), 4, (1, 4)),
        ((3, 4), 2, (1, 2)),
    ],
)
def test_slices_lie_along_the_first_axis_that_they_divide(shape, slices, outer):
    devices = tpus("TPU v4", (math.prod(shape) // slices, 1, 1), slices=slices)
    grid = granule_grid(mesh_on(devices, shape, ("a", "b")).devices)
    for axis, parts in enumerate(outer):
        assert len({tuple(row) for row in np.moveaxis(grid, axis, 0).tolist()}) == parts


def test_slices_that_no_axis_can_take_are_told():
    devices = tpus("TPU v4", (3, 3, 1), slices=4)
    with pytest.raises(
        UsageError, match="none of the axes of mesh \\(6, 6\\) is a multiple of the 4"
    ):
        mesh_on(devices, (6, 6), ("a", "b"))
    assert mesh_on(devices, (6, 6), ("a", "b"), dcn_mesh_dims=(2, 2)).size == 36


def test_a_dcn_part_that_does_not_divide_its_axis_is_refused():
    with pytest.raises(UsageError) as caught:
        mesh_on(gpus(2, 8), (1, 16), ("a", "b"), dcn_mesh_dims=(2, 1))
    assert "asks for 2 granules along axis 0 of mesh (1, 16), whose size 1 is not" in str(
        caught.value
    )


def test_without_a_second_granule_a_dcn_part_has_no_effect_and_says_so(caplog):
    with cpu_world(8):
        mesh = create_mesh((4, 2), ("a", "b"), dcn_mesh_dims=(4, 1))
    assert dict(mesh.shape) == {"a": 4, "b": 2}
    assert caplog.messages == ["dcn_mesh_dims (4, 1) has no effect: the devices form one granule"]
    with cpu_world(8):
        assert create_mesh((4, 2), ("a", "b"), dcn_mesh_dims=(4, 1)) is mesh
    assert len(caplog.messages) == 2, "said whenever it is asked for"
    caplog.clear()
    with cpu_world(8):
        create_mesh((4, 2), ("a", "b"), dcn_mesh_dims=(-1, 1))
    assert not caplog.messages


def test_a_dcn_part_that_cannot_be_inferred_is_refused_with_one_granule_too():
    said = r"`dcn_mesh_dims`: the -1 in mesh sizes \(3, -1\) cannot be inferred: 1 granules"
    with cpu_world(8), pytest.raises(UsageError, match=said):
        create_mesh((4, 2), ("a", "b"), dcn_mesh_dims=(3, -1))


def test_slices_come_from_the_devices_not_from_the_environment():
    with world(gpus(2, 4), processes=2, environment={"MEGASCALE_NUM_SLICES": "4"}):
        assert granule_grid(create_mesh((2, 4), ("a", "b")).devices).tolist() == [[0] * 4, [1] * 4]


def test_granules_in_the_order_of_their_first_device():
    devices = gpus(2, 2)[::-1]
    in_order = mesh_on(devices, (4,), ("a",))
    as_given = mesh_on(devices, (4,), ("a",), sort_granules=False)
    assert granule_grid(in_order.devices).tolist() == [0, 0, 1, 1]
    assert granule_grid(as_given.devices).tolist() == [1, 1, 0, 0]


def test_physical_axes_are_split_only_if_allowed():
    devices = tpus("TPU v4", (4, 4, 1))
    assert mesh_on(devices, (2, 8), ("a", "b")).size == 16
    with pytest.raises(UsageError, match="jax cannot lay mesh `a:2,b:8` out"):
        mesh_on(devices, (2, 8), ("a", "b"), allow_split_physical_axes=False)


@pytest.mark.parametrize("use_jax", [False, True])
def test_axes_are_auto_on_every_path_unless_asked(use_jax):
    with cpu_world(8):
        auto = create_mesh((2, 4), ("a", "b"), use_jax=use_jax)
        mixed = create_mesh((2, 4), ("a", "b"), use_jax=use_jax, axis_types=("auto", "EXPLICIT "))
    assert auto.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mixed.axis_types == (AxisType.Auto, AxisType.Explicit)


def test_jax_lays_out_what_it_can(caplog):
    devices = tpus("TPU v4", (4, 4, 1))
    by_jax = mesh_on(devices, (4, 4), ("a", "b"), use_jax=True)
    assert by_jax is mesh_on(devices, (4, 4), ("a", "b"))
    with pytest.raises(UsageError, match=r"jax\.make_mesh cannot lay mesh `a:2,b:8` out"):
        mesh_on(devices, (2, 8), ("a", "b"), use_jax=True)
    # Granules: what jax.make_mesh refuses or does not look at is laid out here.
    two = gpus(2, 4)
    assert not caplog.messages
    for _ in range(2):
        assert mesh_on(two, (2, 4), ("a", "b"), use_jax=True) is mesh_on(two, (2, 4), ("a", "b"))
    said = (
        "use_jax has no effect: the devices form 2 granules (TPU slices or, elsewhere, processes)"
    )
    assert [message.startswith(said) for message in caplog.messages] == [True, True]


def test_a_mesh_is_made_once_for_its_arguments_and_devices():
    with cpu_world(8):
        first = create_mesh((2, -1), ["a", "b"])
        assert create_mesh([2, -1], ("a", "b"), axis_types="auto") is first
    with cpu_world(4):
        other = create_mesh((2, -1), ["a", "b"])
    assert (first.size, other.size) == (8, 4)
    with cpu_world(8):
        assert create_mesh((2, -1), ["a", "b"]) is first


def test_sizes_may_be_an_array():
    with cpu_world(8):
        assert create_mesh(np.array([2, -1]), ("a", "b")) is create_mesh((2, 4), ("a", "b"))
        with pytest.raises(TypeError, match=r"must be integers, got a float: 2\.0"):
            create_mesh(np.array([2.0, 4.0]), ("a", "b"))
        with pytest.raises(TypeError, match="must be integers, got a list"):
            create_mesh(np.array([[2, 4]]), ("a", "b"))


def test_a_slice_without_a_number_is_slice_zero():
    one, other = tpus("TPU v4", (2, 2, 1), slices=2)[::2], tpus("TPU v4", (2, 2, 1), slices=2)[1::2]
    unnumbered = [replace(device, slice_index=None) for device in one]
    grid = mesh_on([*other, *unnumbered], (2, 4), ("a", "b")).devices
    assert [[device.slice_index for device in row] for row in grid] == [[None] * 4, [1] * 4]
    mixed = [*unnumbered[:2], *one[2:]]
    assert mesh_on(mixed, (4,), ("a",)).size == 4


def test_the_default_backend_and_a_named_one():
    assert create_mesh(backend="cpu") is create_mesh()
    assert create_mesh().devices.size == jax.device_count()
    with pytest.raises(UsageError, match="jax has no backend `tpu` here: Unknown backend"):
        create_mesh(backend="tpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((2, 2), ("a", "b")), "`axis_dims`: mesh sizes (2, 2) multiply to 4, but there are 8"),
        (((3, -1), ("a", "b")), "`axis_dims`: the -1 in mesh sizes (3, -1) cannot be inferred"),
        (((-1, -1), ("a", "b")), "`axis_dims`: mesh sizes (-1, -1) hold more than one -1"),
        (((0, 8), ("a", "b")), "`axis_dims`: mesh size 0 in (0, 8) is neither positive nor -1"),
        (((8,), ("a", "b")), "`axis_dims` (8,) has 1 sizes for the 2 axes ['a', 'b']"),
        (((2, 4), ("a", "a")), "distinct names, got ['a', 'a']"),
        (((2, 4), ("a", "b"), (1,)), "`dcn_mesh_dims` (1,) has 1 sizes for the 2 axes"),
        (((2, 4), ("a", "b"), (0, 1)), "`dcn_mesh_dims`: mesh size 0 in (0, 1)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, said):
    with cpu_world(8), pytest.raises(UsageError) as caught:
        create_mesh(*arguments)
    assert said in caught.value.message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2,4", ("a", "b")), "`axis_dims` must be a sequence of integers, got a str: '2,4'"),
        (((2.0, 4), ("a", "b")), "must be integers, got a float: 2.0"),
        (((8,), "a"), "`axis_names` must be a sequence of strings, got a str: 'a'"),
        (((8,), (1,)), "`axis_names` must be strings, got an int: 1"),
        (((8,), 3), "`axis_names` must be a sequence of strings, got an int: 3"),
        (((8,), ("a",), None, True, True, 3), "`backend` must be a string, got an int: 3"),
        (
            ((8,), ("a",), None, [1]),
            "`should_sort_granules_by_key` must be a bool, got a list: [1]",
        ),
        (((8,), ("a",), None, True, 1), "`allow_split_physical_axes` must be a bool, got an int"),
        (((8,), ("a",), None, True, True, None, "no"), "`use_jax` must be a bool, got a str: 'no'"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(arguments, said):
    with cpu_world(8), pytest.raises(TypeError) as caught:
        create_mesh(*arguments)
    assert said in str(caught.value)
