"""Specs that name reduced axes, which newer versions of jax refuse to iterate."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from automesh.program.carry.meshes import Binding, stored_mesh
from automesh.program.carry.trace_file import Handed, read_trace, write_trace
from automesh.program.spec_entries import entries_of

SPECS = {
    "plain": PartitionSpec("data", None, ("model", "data")),
    "nothing": PartitionSpec(),
    "reduced": PartitionSpec(None, "model", reduced=frozenset({"data"})),
    "unreduced": PartitionSpec("model", unreduced=frozenset({"data"})),
}


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("plain", ("data", None, ("model", "data"))),
        ("nothing", ()),
        ("reduced", (None, "model")),
        ("unreduced", ("model",)),
    ],
)
def test_the_entries_of_a_spec(name: str, entries: tuple[object, ...]) -> None:
    assert entries_of(SPECS[name]) == entries
    assert entries_of(entries) == entries


@pytest.mark.parametrize("name", SPECS)
def test_a_stored_spec_is_read_with_its_reduced_axes(name: str) -> None:
    """Before, a step with `jax.P(..., reduced={'data'})` could not be searched on jax 0.12."""
    mesh = jax.make_mesh(
        (1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1]
    )
    handed = Handed(own=mesh)
    data = write_trace(SPECS[name], handed)
    binding = Binding(plan=mesh, stored=handed.meshes, own=stored_mesh(mesh, mesh))
    assert read_trace(data, binding, ()) == SPECS[name]
