"""A first prediction of a step's time from what its compiled program does.

Good for ranking, not as a time: compute and memory overlap perfectly, collectives overlap with
nothing, and every mesh axis has one link of the chip's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hardware import Chip
from automesh.outcomes import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by cause.

    Attributes:
      compute_s: matrix multiplications at the chip's peak.
      memory_s: bytes at the chip's memory bandwidth.
      network_s: (axes joined by `+`, seconds) of the collectives over each set of mesh axes.
    """

    compute_s: float
    memory_s: float
    network_s: tuple[tuple[str, float], ...]

    @property
    def step_s(self) -> float:
        """The larger of compute and memory, plus all collectives: the network overlaps nothing."""
        return max(self.compute_s, self.memory_s) + sum(seconds for _, seconds in self.network_s)

    @property
    def causes(self) -> tuple[tuple[str, float], ...]:
        """(cause, seconds) that sum to `step_s`: compute hides behind memory, or the reverse."""
        hiding = "compute" if self.compute_s >= self.memory_s else "memory"
        network = tuple((f"network {axes}", seconds) for axes, seconds in self.network_s)
        return ((hiding, max(self.compute_s, self.memory_s)), *network)

    @property
    def bound_by(self) -> str:
        """The largest cause: `compute`, `memory`, or the axes of the slowest collectives."""
        causes = [("compute", self.compute_s), ("memory", self.memory_s), *self.network_s]
        return max(causes, key=lambda cause: cause[1])[0]


def predict(counts: Counts, chip: Chip) -> StepTime:
    """Prices one device's work of one step.

    Collectives: `count` latencies plus ring bytes over one link (scaling-book, "Sharded matrices").
    """
    network: dict[str, float] = {}
    for collective in counts.collectives:
        axes = "+".join(collective.axes) or "network"
        seconds = (
            collective.count * chip.link_latency_s + collective.wire_bytes / chip.link_bytes_per_s
        )
        network[axes] = network.get(axes, 0.0) + seconds
    return StepTime(
        compute_s=counts.flops / chip.flops_per_s,
        memory_s=counts.hbm_bytes / chip.hbm_bytes_per_s,
        network_s=tuple(sorted(network.items())),
    )
