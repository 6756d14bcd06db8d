"""Finds where the devices of a mesh are: granule and chip by number in a program, and the physical
dimensions of a torus that its axes lie along, in words (no jax)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.fabric.fabric import AxisSpan, Fabric, Layouts
from automesh.hardware.fabric.routes import shapes_in, unasked
from automesh.mesh.axes import MeshAxis

Ints = NDArray[np.int64]


def places_along(spans: Sequence[Sequence[AxisSpan]], shape: tuple[int, ...]) -> Ints:
    """Returns x, y, z and core at each point of a shape that follows its spans: [*shape, 4].

    Along one axis the devices follow its spans one after the other, x outermost, cores innermost,
    as `reshape` and `transpose` of the physical devices leave them.
    """
    total = np.zeros((*shape, 4), np.int64)
    for axis, size in enumerate(shape):
        ordered = sorted(spans[axis], key=lambda span: span.dimension % 4)
        line = np.zeros((1, 4), np.int64)
        for span in ordered:
            steps = np.zeros((span.extent, 4), np.int64)
            steps[:, span.dimension % 4] = span.stride * np.arange(span.extent)
            line = (line[:, None] + steps[None]).reshape(-1, 4)
        total += line.reshape(*(size if one == axis else 1 for one in range(len(shape))), 4)
    return total


class Placement:
    """The positions of the devices of one mesh.

    Device i of a program is element i of the flat mesh; along an axis that crosses granules the
    granule counts first, as in `jax.experimental.mesh_utils.create_hybrid_device_mesh`.

    Attributes:
      granule: [devices] number of the granule.
      place: [devices, 4] x, y, z and core inside it; without a torus, the device's number there in
        the last column.

    Raises:
      AutomeshError: `layouts` says nothing about the shape of the mesh.
    """

    def __init__(self, axes: Sequence[MeshAxis], fabric: Fabric, layouts: Layouts) -> None:
        self.fabric = fabric
        self.axes = tuple(axes)
        shape = tuple(axis.ici for axis in axes)
        granules = tuple(axis.dcn for axis in axes)
        inside = _inside(fabric, layouts, shape)
        sizes = tuple(axis.size for axis in axes)
        indices = np.indices(sizes).reshape(len(sizes), -1)
        outer = [index // axis.ici for index, axis in zip(indices, axes, strict=True)]
        inner = [index % axis.ici for index, axis in zip(indices, axes, strict=True)]
        self.granule: Ints = np.ravel_multi_index(tuple(outer), granules).astype(np.int64)
        self.place: Ints = inside[tuple(inner)]

    def __len__(self) -> int:
        return len(self.granule)


def axes_in_words(axes: Sequence[MeshAxis], fabric: Fabric, layouts: Layouts) -> tuple[str, ...]:
    """Says for each axis of a mesh along which physical dimensions of the torus it lies, and
    whether its devices form a ring there: `fsdp x ring of 4, y 2 of 4`.

    A part of a dimension is a line without wraparound; with a stride its neighbours are that many
    chips apart. Empty if there is no torus, or if jax cannot lay the mesh out.

    Raises:
      AutomeshError: `layouts` says nothing about the shape of the mesh.
    """
    shape = tuple(axis.ici for axis in axes)
    known = shapes_in(layouts)
    if fabric.kind != "torus" or shape in known.refused:
        return ()
    if shape in known.wound or any(one.shape == shape for one in layouts.crooked):
        names = ", ".join(axis.name for axis in axes if axis.ici > 1)
        return (f"{names} wound through the torus, along no straight dimensions",) if names else ()
    if shape not in known.straight:
        raise unasked(shape)
    spans = layouts.spans[known.straight[shape]]
    return tuple(
        f"{axis.name} {', '.join(_span_in_words(span, fabric) for span in along)}"
        for axis, along in zip(axes, spans, strict=True)
        if along
    )


def _span_in_words(span: AxisSpan, fabric: Fabric) -> str:
    if span.dimension < 0:
        return f"{span.extent} devices of a chip"
    name, full = "xyz"[span.dimension], fabric.torus[span.dimension]
    apart = f", {span.stride} chips apart" if span.stride > 1 else ""
    if span.extent * span.stride < full:
        return f"{name} {span.extent} of {full}{apart}"
    form = "ring" if fabric.wraps[span.dimension] else "line"
    return f"{name} {form} of {span.extent}{apart}"


def _inside(fabric: Fabric, layouts: Layouts, shape: tuple[int, ...]) -> Ints:
    """Returns the positions of the devices of one granule: [*shape, 4]."""
    if fabric.kind != "torus":
        places = np.zeros((*shape, 4), np.int64)
        places[..., 3] = np.arange(math.prod(shape)).reshape(shape)
        return places
    known = shapes_in(layouts)
    if shape in known.wound:
        return known.wound[shape]
    if shape not in known.straight:
        raise unasked(shape)
    return places_along(layouts.spans[known.straight[shape]], shape)
