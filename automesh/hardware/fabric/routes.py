"""Finds the links that sets of mesh axes use, for many meshes at once (numpy, no jax)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from automesh.errors import AutomeshError
from automesh.hardware.fabric.fabric import Fabric, Floats, Layouts, Reach, Route
from automesh.hardware.fabric.torus import Ints, reach, ring_loads
from automesh.mesh.plan_arrays import Batch

# Bandwidth between the two cores of a chip, in links of one direction: an assumption, no source was
# found. As long as it is several links, other links are the bottleneck.
CORE_LINKS = 6.0
_ALONE = (math.inf, 0.0, 1.0, 1.0, 1.0)
Links = tuple[float, float, float, float, float]


def routes(fabric: Fabric, layouts: Layouts, batch: Batch, axes: tuple[str, ...]) -> Route:
    """Returns the routes of the groups along some axes.

    Args:
      layouts: of all ICI shapes in the batch; only used if the fabric is a torus.
      axes: names of the batch's axes; none gives groups of one device.

    Returns:
      One route per mesh. A mesh of a shape that jax refuses to lay out has NaN for its links.

    Raises:
      AutomeshError: `layouts` says nothing about a shape of the batch.
    """
    columns = tuple(place for place, name in enumerate(batch.names) if name in axes)
    ici_size = batch.ici[:, columns].prod(axis=1).astype(np.float64)
    dcn_size = batch.dcn[:, columns].prod(axis=1).astype(np.float64)
    if fabric.kind == "torus":
        links = _torus_links(fabric, layouts, batch, columns)
    else:
        links = _switch_links(fabric, ici_size)
    return Route(
        ici_size=ici_size,
        dcn_size=dcn_size,
        ici_bytes_per_s=links[0],
        ici_hops=links[1],
        # Each device sends its own part of the array: a group with several devices in a granule
        # uses the network share of each.
        dcn_bytes_per_s=np.full(len(batch), fabric.chip.dcn_bytes_per_s),
        ici_transit=links[2],
        ici_step_share=links[3],
        ici_pair_share=links[4],
    )


def _switch_links(fabric: Fabric, size: Floats) -> tuple[Floats, ...]:
    """Returns links of a switch or a shared memory, which carries all that each device can send."""
    speed = np.where(size > 1, fabric.chip.link_bytes_per_s, math.inf)
    one = np.ones_like(size)
    # Two messages share what a device can send.
    return speed, size - 1, one, one, one / 2


def _torus_links(
    fabric: Fabric, layouts: Layouts, batch: Batch, columns: tuple[int, ...]
) -> tuple[Floats, ...]:
    shapes, place = np.unique(batch.ici, axis=0, return_inverse=True)
    known = shapes_in(layouts)
    table = np.empty((len(shapes), 5))
    for row, sizes in enumerate(shapes):
        shape = tuple(int(size) for size in sizes)
        # For an axis of size 1 the position does not matter.
        real = tuple(column for column in columns if shape[column] > 1)
        table[row] = _shape_links(fabric, layouts, known, shape, real)
    links = table[place.reshape(-1)]
    return tuple(links.T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Indices into `Layouts`, by shape.

    Attributes:
      straight: shapes that are products of spans, with their place.
      wound: [*shape, 4] x, y, z and core of the device at each point.
    """

    straight: dict[tuple[int, ...], int]
    crooked: dict[tuple[tuple[int, ...], tuple[int, ...]], Reach]
    refused: frozenset[tuple[int, ...]]
    wound: dict[tuple[int, ...], Ints]


@lru_cache(maxsize=4)
def shapes_in(layouts: Layouts) -> Shapes:
    """Indexes layouts by shape."""
    crooked = {(one.shape, one.axes): one.reach for one in layouts.crooked}
    bent = {shape for shape, _ in crooked}
    return Shapes(
        straight={shape: i for i, shape in enumerate(layouts.shapes) if shape not in bent},
        crooked=crooked,
        refused=frozenset(shape for shape, _ in layouts.refused),
        wound={
            one.shape: np.array(one.places, np.int64).reshape(*one.shape, 4)
            for one in layouts.wound
        },
    )


def unasked(shape: tuple[int, ...]) -> AutomeshError:
    """Makes the error for a shape that is missing in the layouts."""
    return AutomeshError(f"no layout of the shape {'x'.join(map(str, shape))} was asked for")


def _shape_links(
    fabric: Fabric,
    layouts: Layouts,
    known: Shapes,
    shape: tuple[int, ...],
    columns: tuple[int, ...],
) -> Links:
    """Computes speed, hops, transit, step and pair share of groups along some axes of a shape."""
    if not columns:
        return _ALONE
    size = math.prod(shape[column] for column in columns)
    if shape in known.straight:
        spans = layouts.spans[known.straight[shape]]
        here = tuple(span for column in columns for span in spans[column])
        found = reach(here, fabric.torus, fabric.wraps)
        if shape in known.wound and found.chips > 1:
            found = replace(found, pair_links=_pair_links(fabric, known.wound[shape], columns))
        # Groups on one device of each chip leave half its links to those on the other.
        share = size / found.chips / fabric.devices_per_chip
    elif (shape, columns) in known.crooked:
        found, share = known.crooked[shape, columns], 1.0
    elif shape in known.refused:
        return math.nan, math.nan, math.nan, math.nan, math.nan
    else:
        raise unasked(shape)
    return device_links(fabric, found, size, share)


def _pair_links(fabric: Fabric, places: Ints, columns: tuple[int, ...]) -> float:
    """Computes `Reach.pair_links` of groups along some axes of a mesh with known positions."""
    size = math.prod(places.shape[column] for column in columns)
    last = tuple(range(places.ndim - 1 - len(columns), places.ndim - 1))
    groups = np.moveaxis(places, columns, last).reshape(-1, size, 4)
    return 1.0 / max(ring_loads(list(groups), fabric).values())


def device_links(fabric: Fabric, found: Reach, size: int, share: float) -> Links:
    """Converts the link capacity of a chip to that of one of its devices.

    Chips exchange the data of all their devices, and the devices of a chip exchange it with each
    other at the same time: the slower of both counts.

    Args:
      share: part of the links in `found` that the group has.
    """
    link = fabric.chip.link_bytes_per_s * fabric.devices_per_chip
    chips, each = found.chips, size / found.chips
    gather = spread = 0.0  # Seconds for an array of one byte.
    step = pair = math.inf
    if chips > 1:
        gather = (chips - 1) / chips / (found.links * share * link)
        spread = found.spread / (share * link)
        step = found.step_links * share * link
        pair = found.pair_links * share * link
    if each > 1:
        between = CORE_LINKS * link
        gather = max(gather, (each - 1) / each / between)
        spread = max(spread, (each - 1) / each / size / between)
        step, pair = min(step, between), min(pair, between)
    speed = (size - 1) / size / gather
    return speed, found.hops, spread * speed * size**2 / (size - 1), step / speed, pair / speed
