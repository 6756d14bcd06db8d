"""The interface between pricing and hardware: seconds of one piece of work, for many meshes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from automesh.collectives import MEASURED, CollectiveKind, kind_named
from automesh.hardware.fabric.fabric import Floats, Route


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeconds:
    """Seconds of one collective by cause; every field is [meshes], 0 for groups of one device."""

    latency_s: Floats
    ici_s: Floats
    dcn_s: Floats


def sent_inside(kind: str, payload_bytes: Floats, route: Route) -> Floats:
    """Returns the bytes that one device sends to its group inside a granule: [meshes].

    Their time is this divided by the device's share of `Route.ici_bytes_per_s`: a byte of an
    all-to-all counts once per link that it crosses, and a byte of a permute by the links that it
    can use.

    Rings (scaling-book, "Sharded matrices"): each device sends all of the array but its own part,
    twice to reduce and gather; all-to-all sends each part to its own device only.

    Raises:
      ValueError: `kind` is none of `collectives.MEASURED`.
    """
    size = np.maximum(route.ici_size, 1.0)
    sent = payload_bytes * (size - 1) / size
    sends = measured_kind(kind).sends
    if sends == "forward":
        # Over granules, the devices at the edges of granules are the slowest.
        return np.where(route.dcn_size > 1, 0.0, payload_bytes) / route.ici_step_share
    if sends == "exchange":
        return sent * route.ici_transit / (size * route.dcn_size)
    return sent * passes_of(kind)


def sent_between(kind: str, payload_bytes: Floats, route: Route) -> Floats:
    """Returns the bytes that one device sends to other granules: [meshes].

    Their time is this divided by `Route.dcn_bytes_per_s`. In a collective over granules, each
    device sends the part that remains after the step inside its granule; see
    `DataSheet.collective_s`.

    Raises:
      ValueError: `kind` is none of `collectives.MEASURED`.
    """
    granules = np.maximum(route.dcn_size, 1.0)
    sends = measured_kind(kind).sends
    if sends == "forward":
        return np.where(granules > 1, payload_bytes, 0.0)
    sent = payload_bytes / np.maximum(route.ici_size, 1.0) * (granules - 1) / granules
    return sent / granules if sends == "exchange" else sent * passes_of(kind)


def passes_of(kind: str) -> int:
    """Returns how often a measured kind of collective sends an array round its ring.

    Raises:
      ValueError: `kind` is none of `collectives.MEASURED`.
    """
    return measured_kind(kind).passes


def measured_kind(kind: str) -> CollectiveKind:
    """Returns a kind that has its own formulas and measurements.

    Raises:
      ValueError: `kind` is none of `collectives.MEASURED`.
    """
    if kind not in MEASURED:
        raise ValueError(f"no formula for a collective of kind {kind}")
    return kind_named(kind)


class Speeds(Protocol):
    """The achieved speeds of one device, from a data sheet or from a calibration.

    Attributes:
      origin: where the figures come from, in words: `data sheet of TPU v5p`, `calibrated here`.
      memory_bytes_per_s: achieved when streaming through device memory.
      kernel_overhead_s: of starting one kernel.
      near_bytes: arrays up to this size stay on the chip between the kernels that use them; 0 where
        none do.
      epilogue_bytes_per_s: rate at which a product can write its result and read further inputs, in
        any memory; 0 if only the memory limits it.
      host_bytes_per_s: one way between a device's memory and that of its host.
      window_flops_per_byte: a multiplication in a ring of n devices pays if n times its FLOPs per
        sent byte exceed this; 0 if every ring pays. See `automesh.cost.windowed`.
      bound_memory_bytes_per_s: a proven upper limit for devices of this kind; 0 if none is known.
    """

    @property
    def origin(self) -> str: ...
    @property
    def memory_bytes_per_s(self) -> float: ...
    @property
    def kernel_overhead_s(self) -> float: ...
    @property
    def near_bytes(self) -> float: ...
    @property
    def epilogue_bytes_per_s(self) -> float: ...
    @property
    def host_bytes_per_s(self) -> float: ...
    @property
    def window_flops_per_byte(self) -> float: ...
    @property
    def bound_memory_bytes_per_s(self) -> float: ...

    def bound_flops_per_s(self, dtype: str) -> float:
        """Returns a proven upper limit of matmul FLOP/s on `dtype`; 0 if none is known."""
        ...

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        """Returns the seconds of one multiplication of these local sizes, without those of its
        memory traffic."""
        ...

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        """Returns the seconds of one collective.

        Args:
          kind: one of `collectives.MEASURED`.
          payload_bytes: the full (gathered, unreduced) array of one group; for collective-permute
            what one device sends.
        """
        ...
