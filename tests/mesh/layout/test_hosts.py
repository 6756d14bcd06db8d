"""`calculate_host_mesh_shape` against all factorizations."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.layout.hosts import calculate_host_mesh_shape
from tests.support.fakes.worlds import gpus, world


def splits(shape: tuple[int, ...], hosts: int) -> list[tuple[int, ...]]:
    """By brute force: the hosts along each axis, wherever they divide it and make up all."""
    divisors = [[d for d in range(1, size + 1) if size % d == 0] for size in shape]
    return [one for one in itertools.product(*divisors) if math.prod(one) == hosts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple), st.integers(1, 48))
def test_a_host_shape_is_found_whenever_there_is_one_leading_axes_first(shape, hosts):
    found = splits(shape, hosts)
    if math.prod(shape) % hosts:
        assert not found
        with pytest.raises(UsageError, match="places, but there are"):
            calculate_host_mesh_shape(shape, max(math.prod(shape) // hosts, 1), hosts)
        return
    inside = calculate_host_mesh_shape(shape, math.prod(shape) // hosts, hosts)
    along = tuple(size // part for size, part in zip(shape, inside, strict=True))
    assert along == max(found)
    assert tuple(i * a for i, a in zip(inside, along, strict=True)) == shape
    assert math.prod(inside) * hosts == math.prod(shape)


def test_all_small_shapes():
    for shape in itertools.product(range(1, 13), repeat=2):
        for hosts in (n for n in range(1, 13) if math.prod(shape) % n == 0):
            inside = calculate_host_mesh_shape(shape, math.prod(shape) // hosts, hosts)
            assert inside == tuple(
                size // part for size, part in zip(shape, max(splits(shape, hosts)), strict=True)
            )


def test_jax_counts_what_is_left_out():
    assert calculate_host_mesh_shape((jax.device_count(), 1)) == (jax.device_count(), 1)
    with world(gpus(4, 6), processes=4):
        assert calculate_host_mesh_shape((6, 4)) == (3, 2)
        assert calculate_host_mesh_shape((6, 2), num_processes=2) == (3, 2)


def test_numbers_may_be_those_of_numpy():
    inside = calculate_host_mesh_shape(np.array([2, 4]), np.int64(4), np.int32(2))
    assert inside == (1, 4)
    assert {type(size) for size in inside} == {int}
    for wrong in (np.float64(2), True, "2"):
        with pytest.raises(TypeError, match="`num_processes` must be an integer, got a"):
            calculate_host_mesh_shape((2, 4), 4, wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((2, 4), 0, 2), "`total_devices` is 0; it must be at least 1"),
        (((2, 4), 4, -1), "`num_processes` is -1; it must be at least 1"),
        (((-1, 4), 4, 2), "`global_mesh_shape` (-1, 4) holds a -1"),
        (((0, 4), 4, 2), "mesh size 0 in (0, 4) is neither positive nor -1"),
        (((2, 4), 8, 2), "(2, 4) has 8 places, but there are 16 devices (8 on each of 2 hosts)"),
        (((), 4, 2), "() has 1 places, but there are 8 devices"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(UsageError) as caught:
        calculate_host_mesh_shape(*arguments)
    assert said in caught.value.message


@pytest.mark.parametrize(
    "arguments", [("2,4", 4, 2), ((2.0, 4), 4, 2), ((2, 4), 4.0, 2), (8, 4, 2)]
)
def test_numbers_that_are_none_are_refused(arguments):
    with pytest.raises(TypeError, match="must be"):
        calculate_host_mesh_shape(*arguments)
