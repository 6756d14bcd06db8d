"""How the devices of a target are wired, and how mesh axes map to the wires (numpy, no jax)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.chips import Chip

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The devices of a target.

    Attributes:
      kind: `torus` of point-to-point links (TPU), `switch` that joins all devices of a granule
        (NVLink), `shared` memory of one host (virtual CPU devices).
      granule_devices: jax devices in one granule (slice, node or process).
      torus: chips along each physical dimension of a granule; empty unless `kind` is `torus`.
      wraps: per dimension, whether its ends are linked.
      devices_per_chip: 2 where a chip is two devices.
    """

    kind: Literal["torus", "switch", "shared"]
    chip: Chip
    num_granules: int
    granule_devices: int
    torus: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    devices_per_chip: int = 1

    @property
    def num_devices(self) -> int:
        return self.num_granules * self.granule_devices


def torus_of(
    chip: Chip, torus: tuple[int, ...], *, wraps: tuple[bool, ...], granules: int
) -> Fabric:
    """Makes the fabric of slices; the chips of each slice are linked in a torus."""
    return Fabric(
        kind="torus",
        chip=chip,
        num_granules=granules,
        granule_devices=math.prod(torus) * chip.devices_per_chip,
        torus=torus,
        wraps=wraps,
        devices_per_chip=chip.devices_per_chip,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpan:
    """The part of one mesh axis that lies along one physical dimension of a granule.

    Attributes:
      dimension: index into `Fabric.torus`; -1 stands for the devices of one chip.
      extent: positions along it.
      stride: distance between neighbouring positions, in chips; at least 1.
    """

    dimension: int
    extent: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The link capacity of one group of chips in a torus while all groups like it communicate.

    Attributes:
      chips: of one group.
      links: links in one direction that each chip can use for the group; 0 inside one chip.
      step_links: the same if each chip sends to the next one of its ring only.
      pair_links: the same for each of two messages, if each chip sends to the next and the previous
        one.
      hops: links along one pass, see `Route.ici_hops`.
      spread: time of an all-to-all of an array of one byte over links of one byte per second.
    """

    chips: int
    links: float
    step_links: float
    pair_links: float
    hops: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crooked:
    """Groups along some axes of a shape that is no product of spans, traced link by link.

    Attributes:
      shape: sizes of all mesh axes inside one granule.
      axes: indices of the axes that the groups span, ascending; those of size 1 left out.
      reach: counts links for one group, whether a chip's two devices are in the same group or not.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """Positions of the devices of a shape that does not follow its spans point by point.

    Attributes:
      shape: sizes of all mesh axes inside one granule.
      places: x, y, z and core of the device at each point of the mesh, row by row.
    """

    shape: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The places of mesh axes on the torus, per ICI shape, as jax's mesh code chooses them.

    Attributes:
      shapes: sizes of all mesh axes inside one granule.
      spans: per shape and axis, where the axis lies; empty for an axis of size 1, and for all axes
        of a fabric that is no torus.
      crooked: shapes that are no product of spans (jax lays small slices out as one ring); their
        `spans` are empty.
      refused: shapes that jax's mesh code cannot lay out, with its reason; not in `shapes`.
      wound: shapes whose axes do not run along their spans one after the other, x outermost: all
        crooked ones, and small slices that jax lays out as one ring.
    """

    shapes: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[tuple[AxisSpan, ...], ...], ...]
    crooked: tuple[Crooked, ...] = ()
    refused: tuple[tuple[tuple[int, ...], str], ...] = ()
    wound: tuple[Wound, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The links that one set of mesh axes uses, for many meshes: every field is [meshes].

    Attributes:
      ici_size: devices of one group inside a granule.
      dcn_size: granules that a group spans.
      ici_bytes_per_s: what one device can send to its group over all links that serve it, one way,
        at nominal speed; links that other groups share count in part.
      ici_hops: links between the farthest neighbours of the group's ring, summed over the steps of
        one pass; times the time of a hop, this is the latency of one pass.
      dcn_bytes_per_s: one device's share of its host's network, one way, at nominal speed.
      ici_transit: links that a byte of an all-to-all crosses on its way, as a share of all that
        `ici_bytes_per_s` counts: seconds are bytes sent times this over `ici_bytes_per_s`. 1 for a
        switch.
      ici_step_share: the part of `ici_bytes_per_s` that is usable if each device only sends to the
        next one of its ring.
      ici_pair_share: the same for each of two messages, if each device sends to the next and to the
        last one at the same time.
    """

    ici_size: Floats
    dcn_size: Floats
    ici_bytes_per_s: Floats
    ici_hops: Floats
    dcn_bytes_per_s: Floats
    ici_transit: Floats = field(default_factory=lambda: np.ones(()))
    ici_step_share: Floats = field(default_factory=lambda: np.ones(()))
    ici_pair_share: Floats = field(default_factory=lambda: np.ones(()))

    def __post_init__(self) -> None:
        shape = np.shape(self.ici_size)
        object.__setattr__(self, "ici_transit", np.broadcast_to(self.ici_transit, shape))
        object.__setattr__(self, "ici_step_share", np.broadcast_to(self.ici_step_share, shape))
        object.__setattr__(self, "ici_pair_share", np.broadcast_to(self.ici_pair_share, shape))

    def rows(self, rows: NDArray[np.intp]) -> Route:
        """Selects the routes of some meshes."""
        return Route(**{one.name: getattr(self, one.name)[rows] for one in fields(Route)})
