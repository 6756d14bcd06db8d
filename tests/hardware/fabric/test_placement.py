"""Where the axes of a mesh lie on a torus, in words."""

from __future__ import annotations

import pytest

from automesh.hardware.fabric.fabric import AxisSpan, Fabric, Layouts
from automesh.hardware.fabric.placement import axes_in_words
from automesh.hardware.targets import parse_target
from automesh.mesh.axes import MeshAxis

AXES = (MeshAxis(name="dp", ici=2), MeshAxis(name="fsdp", ici=8), MeshAxis(name="tp", ici=4))


def fabric_of(name: str) -> Fabric:
    absent = parse_target(name, {}).absent
    assert absent is not None
    return absent.fabric


def span(dimension: int, extent: int, stride: int = 1) -> AxisSpan:
    return AxisSpan(dimension=dimension, extent=extent, stride=stride)


def test_each_axis_has_its_dimensions_and_what_they_form() -> None:
    fabric = fabric_of("tpu-v5p-128")
    assert (fabric.torus, fabric.wraps) == ((4, 4, 4), (True, True, True))
    spans = ((span(1, 2, 2),), (span(1, 2), span(0, 4)), (span(2, 4),))
    layouts = Layouts(shapes=((2, 8, 4),), spans=(spans,), crooked=(), refused=())
    assert axes_in_words(AXES, fabric, layouts) == (
        "dp y ring of 2, 2 chips apart",
        "fsdp y 2 of 4, x ring of 4",
        "tp z ring of 4",
    )


def test_a_slice_without_wraparound_has_lines_and_chips_have_devices() -> None:
    fabric = fabric_of("tpu-7x-64")
    assert (fabric.torus, fabric.wraps) == ((2, 4, 4), (False, False, False))
    spans = ((span(-1, 2),), (span(0, 2), span(1, 4)), (span(2, 4),))
    layouts = Layouts(shapes=((2, 8, 4),), spans=(spans,), crooked=(), refused=())
    assert axes_in_words(AXES, fabric, layouts) == (
        "dp 2 devices of a chip",
        "fsdp x line of 2, y line of 4",
        "tp z line of 4",
    )


@pytest.mark.parametrize("name", ["tpu-v5p-128", "gpu-h100-64"])
def test_a_mesh_that_is_on_no_torus_has_none(name: str) -> None:
    layouts = Layouts(shapes=(), spans=(), crooked=(), refused=(((2, 8, 4), "no"),))
    assert axes_in_words(AXES, fabric_of(name), layouts) == ()
