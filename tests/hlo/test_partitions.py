"""Partitions of a program for several slices: which elements of the mesh they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.partitions import Partitions

SMALL = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)


def program(device_ids: list[int]) -> Module:
    token = Instruction(id=1, name="t", opcode="after-all", shape=Shape(element_type="token"))
    entry = Computation(
        id=1, name="e", instructions={1: token}, root=1, is_fusion=False, is_scheduled=True
    )
    return Module(name="m", computations={1: entry}, entry=1, device_ids=tuple(device_ids))


@given(SMALL, st.data())
def test_a_slice_is_the_major_part_of_every_axis(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """`parts` are slices and devices inside a slice along each axis."""
    outer, inner = [dcn for dcn, _ in parts], [ici for _, ici in parts]
    axes = tuple((f"a{k}", dcn * ici) for k, (dcn, ici) in enumerate(parts))
    ids = data.draw(st.permutations(range(int(np.prod(inner)))))
    partitions = Partitions(program(ids), axes, outer)
    sizes = [size for _, size in axes]
    for number, where in enumerate(itertools.product(*map(range, outer))):
        for partition, inside in enumerate(itertools.product(*map(range, inner))):
            coordinates = [a * n + b for a, n, b in zip(where, inner, inside)]
            expected = int(np.ravel_multi_index(coordinates, sizes))
            assert partitions.element(number, ids[partition]) == expected
    everyone = sorted(device for group in partitions.groups(()) for device in group)
    assert everyone == list(range(int(np.prod(sizes))))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_program_for_the_whole_mesh_counts_its_elements(sizes: list[int]) -> None:
    axes = tuple((f"a{k}", size) for k, size in enumerate(sizes))
    total = int(np.prod(sizes))
    # GPUs of several nodes work on one program: what the axes cross does not matter.
    for module in (program([]), program(list(range(total)))):
        partitions = Partitions(module, axes, [size for _, size in axes])
        assert partitions.groups(()) == (tuple(range(total)),)
        assert partitions.groups(((0,),)) == ((0,),)


def test_devices_outside_the_mesh_are_refused() -> None:
    partitions = Partitions(program([0, 1, 2, 3]), (("dp", 2), ("tp", 4)), (2, 1))
    with pytest.raises(ValueError, match="device 4 of slice 0 is outside the mesh"):
        partitions.element(0, 4)
    with pytest.raises(ValueError, match="device 0 of slice 2 is outside the mesh"):
        partitions.element(2, 0)
    with pytest.raises(ValueError, match="device 4 is outside the mesh of 4 devices"):
        partitions.groups(((0, 4),))
