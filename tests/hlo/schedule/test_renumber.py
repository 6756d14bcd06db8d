"""Parts of a mesh: their devices keep the numbers that they have in the whole one."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from automesh.cost.replay.replay import replay
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import ScheduledLoop, ScheduledProgram, Start
from automesh.hlo.schedule.renumber import renumbered
from automesh.mesh.axes import MeshAxis
from automesh.tuner.compile.replay import numbers_of
from tests.support.samples.replay_samples import (
    Nominal,
    begin,
    collective,
    end,
    layouts_of,
    loop,
    mesh,
    node_fabric,
    ring,
    schedule,
)


def first_rank(axes: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
    return tuple(MeshAxis(name="pp") if axis.name == "pp" else axis for axis in axes)


def of_the_whole(part: ScheduledProgram, axes: tuple[MeshAxis, ...]) -> ScheduledProgram:
    whole = tuple((axis.name, axis.size) for axis in axes)
    return renumbered(part, whole, numbers_of(first_rank(axes), axes))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 3))
def test_numbers_are_those_of_the_first_rank(sizes: list[int], place: int) -> None:
    place %= len(sizes)
    names = [f"a{number}" for number in range(len(sizes))]
    names[place] = "pp"
    axes = tuple(MeshAxis(name=name, ici=size) for name, size in zip(names, sizes, strict=True))
    numbers = numbers_of(first_rank(axes), axes)
    assert len(numbers) == math.prod(sizes) // sizes[place]
    for number in numbers:
        assert np.unravel_index(number, sizes)[place] == 0
    assert list(numbers) == sorted(numbers)
    if place == 0:
        assert numbers == tuple(range(len(numbers)))


def test_pairs_and_groups_are_renumbered_everywhere() -> None:
    axes = mesh(dp=2, pp=2, tp=2)
    part = first_rank(axes)
    gather, permute = collective("all-gather", part, "tp", 8), ring(part, "dp", 1, 8)
    found = of_the_whole(
        schedule(part, begin(gather), loop(3, begin(permute), end(permute)), end(gather)), axes
    )
    start, layers, _ = found.body.operations
    assert isinstance(start, Start) and isinstance(layers, ScheduledLoop)
    assert start.transfer.groups == ((0, 1), (4, 5))
    inner = layers.body.operations[0]
    assert isinstance(inner, Start)
    assert inner.transfer.pairs == ((0, 4), (1, 5), (4, 0), (5, 1))


def test_it_does_not_matter_where_the_pipeline_axis_stands() -> None:
    """Permutes along dp leave their node, in whichever order the mesh has its axes."""
    fabric = node_fabric(2, 8)
    seconds: list[float] = []
    for axes in (mesh(pp=2, dp=(2, 1), tp=4), mesh(dp=(2, 1), pp=2, tp=4)):
        permute = ring(first_rank(axes), "dp", 1, 4_000_000)
        part = schedule(first_rank(axes), begin(permute), end(permute))
        played, _ = replay(
            of_the_whole(part, axes),
            axes=axes,
            hardware=HardwareModel(
                fabric=fabric, layouts=layouts_of(fabric, axes), speeds=Nominal()
            ),
        )
        assert [name for name, _ in played.causes] == ["dcn dp"]
        seconds.append(played.step_s)
    assert seconds[0] == seconds[1] == 0.04
