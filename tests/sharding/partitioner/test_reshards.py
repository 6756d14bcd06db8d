"""Which reshards gather everything, as in programs of jaxlib 0.12 for CPUs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.sharding.mlir.module import read_graph
from automesh.sharding.partitioner.parts import Part
from automesh.sharding.partitioner.reshards import (
    Tiling,
    depends_on_sizes,
    gathers_all,
    kept_dimensions,
)
from automesh.sharding.passes import partitioned


@pytest.mark.parametrize(
    ("before", "after", "gathers"),
    [
        # (tiles of each dimension, copies of each tile), as compiled.
        (((2, 1, 4), 1), ((1, 8, 1), 1), True),
        (((4, 1), 2), ((1, 4), 2), False),
        (((8, 1), 1), ((1, 8), 1), False),
        (((2, 4), 1), ((8, 1), 1), False),
        (((8, 1), 1), ((2, 2), 2), True),
        (((1, 4), 2), ((8, 1), 1), False),
        (((4, 1, 1), 2), ((1, 4, 2), 1), False),
        (((2, 1, 1), 4), ((1, 4, 1), 2), True),
        (((1, 2, 2), 2), ((1, 1, 8), 1), True),
        (((2, 2, 2), 1), ((1, 8, 1), 1), True),
        (((2, 2, 1), 2), ((1, 1, 2), 4), False),
        (((2, 4), 1), ((4, 2), 1), False),
        (((8, 1), 1), ((1, 1), 8), False),
        (((1, 1), 8), ((1, 8), 1), False),
    ],
)
def test_what_was_compiled(before, after, gathers):
    source, target = (Tiling(tiles=tiles, copies=copies) for tiles, copies in (before, after))
    assert gathers_all(source, target) is gathers


def test_what_is_cut_alike_before_and_after_stays_cut():
    before, after = Tiling(tiles=(1, 2, 4), copies=1), Tiling(tiles=(2, 2, 1), copies=2)
    assert kept_dimensions(before, after) == (False, True, False)


def _part(axis):
    return Part(axis=axis, before=1, size=2)


def test_whether_a_decision_holds_at_all_sizes():
    a, b = _part("a"), _part("b")
    mesh = (("a", 2), ("b", 2))
    assert not depends_on_sizes(((a,), ()), ((), (a,)), mesh)
    # Three dimensions change, whatever the sizes.
    assert not depends_on_sizes(((a,), (), (b,)), ((), (a, b), ()), mesh)
    # As many tiles and copies as before: an all-to-all; of axes of other lengths it is none.
    assert depends_on_sizes(((a,), ()), ((), (b,)), mesh)


@pytest.mark.parametrize(
    ("sizes", "after", "gathered"), [((4, 2), P(None, ("dp", "tp"), None), True),
                                     ((8, 1), P(None, ("dp", "tp"), None), False)]
)  # fmt: skip
def test_the_program_gathers_the_whole_array(sizes, after, gathered):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    before = NamedSharding(mesh, P("tp", None, "dp"))

    def step(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, after))

    x = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32, sharding=before)
    graph = read_graph(partitioned(jax.jit(step).lower(x).compiler_ir("stablehlo")))
    names = [one.name for one in graph.top.operations]
    assert ("all_gather" in names) is gathered and ("all_to_all" in names) is not gathered


def test_a_stack_that_is_split_over_its_layers_is_gathered_for_every_slice():
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Auto,))

    def step(w, x):
        return jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0]

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    lowered = jax.jit(step).lower(array((8, 64, 64), "fsdp"), array((16, 64)))
    graph = read_graph(partitioned(lowered.compiler_ir("stablehlo")))
    (loop,) = [one for one in graph.top.operations if one.name == "while"]
    gathered = [one.results[0] for one in loop.bodies[0].operations if one.name == "all_gather"]
    assert [value.shape for value in gathered] == [(8, 64, 64)]
    assert gathered[0].axes == ((), (), ())


def test_parts_of_an_axis_depend_on_its_size() -> None:
    first, second = Part(axis="a", before=1, size=2), Part(axis="a", before=2, size=4)
    b = Part(axis="b", before=1, size=4)
    # Of eight devices along `a`, two split one dimension and four another.
    assert depends_on_sizes(((first,), (second, b)), ((), (b,)), (("a", 8), ("b", 4)))
