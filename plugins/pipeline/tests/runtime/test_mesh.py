"""Meshes cut into submeshes: shapes, axis types, what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, WrongType
from automesh.pipeline import MpmdMesh

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], **options: object) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, **options)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4), data=st.data())
def test_every_device_is_in_the_submesh_of_its_index(sizes, data):
    at = data.draw(st.integers(0, len(sizes) - 1))
    keep = data.draw(st.booleans())
    names = tuple("abcd"[: len(sizes)])
    mesh = mesh_of(tuple(sizes), names)
    cut = MpmdMesh(mesh, names[at], keep_axis=keep)
    assert cut.num_ranks == sizes[at]
    for rank, one in enumerate(cut.submeshes):
        wanted = np.take(mesh.devices, [rank], axis=at)
        assert list(one.devices.flat) == list(wanted.flat)
        kept = names if keep or len(names) == 1 else tuple(n for n in names if n != names[at])
        assert one.axis_names == kept
        assert one.shape == {n: 1 if n == names[at] else mesh.shape[n] for n in kept}


def test_the_other_axes_keep_their_types():
    mesh = mesh_of((2, 2, 2), ("dp", "pp", "tp"), axis_types=(EXPLICIT, AUTO, AUTO))
    assert [one.axis_types for one in MpmdMesh(mesh).submeshes] == [(EXPLICIT, AUTO)] * 2


def test_submeshes_of_different_shapes():
    devices = jax.devices()
    wide = Mesh(np.array(devices[:4]).reshape(2, 2), ("dp", "tp"))
    narrow = Mesh(np.array(devices[4:6]).reshape(1, 2), ("dp", "tp"))
    cut = MpmdMesh([wide, narrow])
    assert cut.submeshes == (wide, narrow)
    with pytest.raises(UsageError, match="differ in shape"):
        _ = cut.abstract_mesh
    with pytest.raises(UsageError, match=r"device .* is in the submeshes 0 and 1"):
        MpmdMesh([wide, wide])


def test_the_abstract_mesh_is_that_of_every_stage():
    cut = MpmdMesh(mesh_of((2, 4), ("pp", "dp")))
    assert [one.abstract_mesh for one in cut.submeshes] == [cut.abstract_mesh] * 2


def test_wrong_meshes():
    with pytest.raises(UsageError, match="no axis `pipe`"):
        MpmdMesh(mesh_of((2, 4), ("pp", "dp")), "pipe")
    with pytest.raises(WrongType, match="got an int"):
        MpmdMesh(8)
    with pytest.raises(WrongType, match="got a str"):
        MpmdMesh("pp:2")
    with pytest.raises(UsageError, match="got none"):
        MpmdMesh([])
